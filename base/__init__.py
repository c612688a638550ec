"""What every room uses: errors, a user's files, checked numbers, writing. No torch, no GPT."""
