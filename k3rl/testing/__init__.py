"""What tests and authors of plug-ins need."""
