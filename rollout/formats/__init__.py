"""The chat formats, each with its renderer and its parser side by side."""
