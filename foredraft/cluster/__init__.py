"""More than one machine, through Ray Serve: gates that take requests, and engines that run them.

It needs ``pip install 'foredraft[ray]'``. `app` is what Serve's configuration files import.
"""

from foredraft.cluster.deploy import app as app
