"""A PCCL master script: `python examples/pccl/master.py [ADDRESS]`.

It ends after `run()`, and stays up nevertheless: the node's destructor waits for Ctrl-C or SIGTERM. `pccl_master` on
the command line does the same.
"""

import sys

from ringfold.compat.pccl import MasterNode


def main(address: str = "127.0.0.1:48148") -> None:
    node = MasterNode(listen_address=address)
    node.run()
    print(f"listening on {node.listen_address}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
