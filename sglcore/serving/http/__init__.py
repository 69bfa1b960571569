"""HTTP: connections, the application, streams, errors. Modules here may import from all other
folders of the server."""
