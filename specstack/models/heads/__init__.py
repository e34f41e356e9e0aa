"""Draft heads: small torch modules that draft for one frozen target.

`config` says what a head is and needs no torch; `block` and `autoregressive` are the two forms;
`checkpoint` brings them to disk and back. Nothing here knows a serving engine.
"""
