"""What all packages use: errors, atomic files, headers, children, progress. It imports no other.

Read `errors` and `files` first."""
