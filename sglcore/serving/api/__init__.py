"""The endpoints: each module has `routes(frontend)`, which gives a router."""
