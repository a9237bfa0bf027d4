"""Chats: messages, templates, and the mask of what is learned.

Read `chat` first.
"""
