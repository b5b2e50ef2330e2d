"""What the product is measured against; each module runs as a process of its own."""
