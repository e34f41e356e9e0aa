"""Load tests for OpenAI-compatible servers: scenarios, clients, records and reports."""
