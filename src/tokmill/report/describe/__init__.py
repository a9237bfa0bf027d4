"""What `inspect` says of any file or folder. Read `inspect` first."""
