"""Prefill/decode disaggregation: one engine prefills, another decodes, and the KV pages of the
prompt are sent between them."""
