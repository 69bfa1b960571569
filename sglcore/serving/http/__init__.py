"""The room of HTTP: connections, the application, and how every answer is sent. It may import all other rooms."""
