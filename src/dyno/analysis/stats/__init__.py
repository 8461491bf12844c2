"""Statistics as pure functions over samples: summaries, intervals, and whether A is faster than B.

Heavy parts of scipy are not imported: `scipy.special` holds every distribution that is needed here.
"""

from dyno.analysis.stats.decisions import ALPHA as ALPHA
from dyno.analysis.stats.decisions import EQUIVALENT as EQUIVALENT
from dyno.analysis.stats.decisions import FASTER as FASTER
from dyno.analysis.stats.decisions import ONE_ROUND as ONE_ROUND
from dyno.analysis.stats.decisions import SLOWER as SLOWER
from dyno.analysis.stats.decisions import UNDECIDED as UNDECIDED
from dyno.analysis.stats.decisions import Rule as Rule
from dyno.analysis.stats.decisions import Speedup as Speedup
from dyno.analysis.stats.decisions import decide as decide
from dyno.analysis.stats.decisions import decide_family as decide_family
from dyno.analysis.stats.decisions import paired_speedup as paired_speedup
from dyno.analysis.stats.decisions import speedup as speedup
from dyno.analysis.stats.evidence import ALONE as ALONE
from dyno.analysis.stats.evidence import TURNS as TURNS
from dyno.analysis.stats.evidence import Evidence as Evidence
from dyno.analysis.stats.evidence import paired as paired
from dyno.analysis.stats.evidence import unpaired as unpaired
from dyno.analysis.stats.intervals import CONFIDENCE as CONFIDENCE
from dyno.analysis.stats.intervals import Interval as Interval
from dyno.analysis.stats.intervals import center as center
from dyno.analysis.stats.intervals import median_interval as median_interval
from dyno.analysis.stats.intervals import paired_difference as paired_difference
from dyno.analysis.stats.intervals import percentile_interval as percentile_interval
from dyno.analysis.stats.intervals import percentile_of as percentile_of
from dyno.analysis.stats.intervals import samples_for as samples_for
from dyno.analysis.stats.intervals import t_quantile as t_quantile
from dyno.analysis.stats.intervals import wilson as wilson
from dyno.analysis.stats.power import MOST_ROUNDS as MOST_ROUNDS
from dyno.analysis.stats.summaries import Summary as Summary
from dyno.analysis.stats.summaries import over_rounds as over_rounds
from dyno.analysis.stats.summaries import over_units as over_units
from dyno.analysis.stats.summaries import summary as summary
from dyno.analysis.stats.variance import VarianceComponents as VarianceComponents
from dyno.analysis.stats.variance import levels as levels
