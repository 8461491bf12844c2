"""Statistics as pure functions over samples: summaries, intervals, and decisions on which trial is faster.

Of scipy only `scipy.special` is imported: it holds every distribution used here, and the rest is heavy.
"""

from dyno.results.stats.decisions import ALPHA as ALPHA
from dyno.results.stats.decisions import EQUIVALENT as EQUIVALENT
from dyno.results.stats.decisions import FASTER as FASTER
from dyno.results.stats.decisions import MAX_ROUNDS as MAX_ROUNDS
from dyno.results.stats.decisions import ONE_ROUND as ONE_ROUND
from dyno.results.stats.decisions import SLOWER as SLOWER
from dyno.results.stats.decisions import UNDECIDED as UNDECIDED
from dyno.results.stats.decisions import Rule as Rule
from dyno.results.stats.decisions import Speedup as Speedup
from dyno.results.stats.decisions import decide as decide
from dyno.results.stats.decisions import decide_apart as decide_apart
from dyno.results.stats.decisions import decide_family as decide_family
from dyno.results.stats.decisions import paired_speedup as paired_speedup
from dyno.results.stats.evidence import IN_TURNS as IN_TURNS
from dyno.results.stats.evidence import IN_TWO_SESSIONS as IN_TWO_SESSIONS
from dyno.results.stats.evidence import MIN_SESSIONS as MIN_SESSIONS
from dyno.results.stats.evidence import ONE_AFTER_ANOTHER as ONE_AFTER_ANOTHER
from dyno.results.stats.evidence import Evidence as Evidence
from dyno.results.stats.evidence import between_sessions as between_sessions
from dyno.results.stats.evidence import collect_evidence as collect_evidence
from dyno.results.stats.evidence import pair_evidence as pair_evidence
from dyno.results.stats.intervals import CONFIDENCE as CONFIDENCE
from dyno.results.stats.intervals import Interval as Interval
from dyno.results.stats.intervals import compute_wilson as compute_wilson
from dyno.results.stats.intervals import estimate_needed as estimate_needed
from dyno.results.stats.intervals import exceeds as exceeds
from dyno.results.stats.intervals import median_interval as median_interval
from dyno.results.stats.intervals import paired_chance as paired_chance
from dyno.results.stats.intervals import paired_difference as paired_difference
from dyno.results.stats.intervals import percentile_intervals as percentile_intervals
from dyno.results.stats.intervals import percentile_of as percentile_of
from dyno.results.stats.intervals import samples_for as samples_for
from dyno.results.stats.intervals import t_quantile as t_quantile
from dyno.results.stats.rejection import find_center as find_center
from dyno.results.stats.rejection import find_rejected as find_rejected
from dyno.results.stats.rejection import judge_apart as judge_apart
from dyno.results.stats.rejection import judge_studies as judge_studies
from dyno.results.stats.rejection import over_rounds as over_rounds
from dyno.results.stats.summaries import Summary as Summary
from dyno.results.stats.summaries import VarianceComponents as VarianceComponents
from dyno.results.stats.summaries import estimate_levels as estimate_levels
from dyno.results.stats.summaries import over_units as over_units
from dyno.results.stats.summaries import summarise as summarise
