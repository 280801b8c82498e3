"""A study of the certificate: how often its claims hold on made-up losses."""
