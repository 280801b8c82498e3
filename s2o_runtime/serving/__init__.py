"""The parts that S2O's backends for servers share; none of them imports a server."""
