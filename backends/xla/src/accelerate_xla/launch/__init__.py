"""How programs are started on TPUs: processes of one host, the hosts of a pod, and their setup."""
