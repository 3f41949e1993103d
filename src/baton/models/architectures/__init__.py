"""One file per architecture. `registry` names them."""
