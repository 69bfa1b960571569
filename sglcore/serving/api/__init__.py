"""The endpoints: each module has `routes(front)`, which gives a router."""
