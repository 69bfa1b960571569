"""HTTP: connections, the application, streams, errors. It may import all other folders of the
server."""
