"""The command line. Importing this package imports nothing else: each command imports what it needs
when it runs."""
