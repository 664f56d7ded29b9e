"""What a chat answer is made of besides its text: calls of tools and reasoning, one parser for each form of writing."""
