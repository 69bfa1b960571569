"""The web page for chats, at the path `/`."""
