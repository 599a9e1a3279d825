"""The rule-based math reward: find the answer in a response, and compare it with math-verify within a time limit."""
