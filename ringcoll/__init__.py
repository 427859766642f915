"""Collective algorithms for JAX, written by hand: executed, proved, priced, measured."""

from ringcoll import algorithms as algorithms
from ringcoll import cost as cost
from ringcoll import lax as lax
from ringcoll import precision as precision
from ringcoll import pricing as pricing
from ringcoll.all_reduces import pmax as pmax
from ringcoll.all_reduces import pmean as pmean
from ringcoll.all_reduces import pmin as pmin
from ringcoll.all_reduces import psum as psum
from ringcoll.all_to_alls import all_to_all as all_to_all
from ringcoll.all_to_alls import pswapaxes as pswapaxes
from ringcoll.broadcasts import pbroadcast as pbroadcast
from ringcoll.gathers import all_gather as all_gather
from ringcoll.gathers import psum_scatter as psum_scatter
from ringcoll.matmuls import all_gather_einsum as all_gather_einsum
from ringcoll.matmuls import all_gather_matmul as all_gather_matmul
from ringcoll.matmuls import einsum_reduce_scatter as einsum_reduce_scatter
from ringcoll.matmuls import matmul_all_reduce as matmul_all_reduce
from ringcoll.matmuls import matmul_reduce_scatter as matmul_reduce_scatter
from ringcoll.permutes import ppermute as ppermute
from ringcoll.permutes import pshuffle as pshuffle
from ringcoll.schedule import AllToAllSchedule as AllToAllSchedule
from ringcoll.schedule import Move as Move
from ringcoll.schedule import Schedule as Schedule
from ringcoll.schedule import ScheduleError as ScheduleError
from ringcoll.table import Table as Table
