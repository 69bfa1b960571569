"""Device pools: the page table and the KV cells."""
