"""The ground: values and tools that every room may use. It knows no method."""
