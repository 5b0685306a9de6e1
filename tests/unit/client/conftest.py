from scripted_pool import collect as collect
from scripted_pool import elsewhere as elsewhere
from scripted_pool import params as params
from scripted_pool import pool as pool
