"""Where tokens come from: engines behind one protocol, and the channel that brings weights."""
