"""Makers of files: exports, precisions, quantisation, routes."""
