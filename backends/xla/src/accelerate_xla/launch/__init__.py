"""Launching on TPUs: on one host, on all hosts of a pod, and the setup of hosts."""
