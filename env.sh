. /opt/mk/venv/bin/activate
export PYTHONPATH=/tmp/nw/.typing
cd /tmp/nw
