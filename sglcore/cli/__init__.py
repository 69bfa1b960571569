"""The command line. Importing this package costs nothing: each command imports what it needs when
it runs."""
