"""The project's continuous integration as code: lanes computed from the packages, their runs, the
table, the workflows."""
