"""Published and own methods: points in the space of the parts."""
