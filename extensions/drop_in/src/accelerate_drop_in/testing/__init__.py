"""The helpers of `accelerate.test_utils`, for tests of code that uses Accelerate."""
