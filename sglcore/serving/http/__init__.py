"""HTTP: connections, the application, streams, errors. May import all other folders of the
server."""
