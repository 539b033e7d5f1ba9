python3 probe.py 2>&1 | grep -v Warn | cut -c1-300
python3 launch.py bench 2>&1 | tail -20
nvidia-smi -q -d POWER,CLOCK | grep -E "Power Draw|Current Power|SM  |Max" | head; nproc; free -g | head -2; lscpu | grep -E "Model name|NUMA|L3"
