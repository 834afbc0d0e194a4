"""What tests of code on Accelerate share: `accelerate.test_utils`."""
