"""A CPU kernel of our own: C++ that is compiled for this machine when it is first used."""
