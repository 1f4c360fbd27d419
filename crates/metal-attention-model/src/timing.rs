//! How long what is done over and over takes at best, for ceilings that devices are held against.

use std::time::{Duration, Instant};

/// Runs of a measurement, of which the best counts.
const ROUNDS: usize = 3;

/// Seconds of one of the things that `run` does so many of, given how many: the best of a few rounds, each of as many as take a part
/// of `time`, or of `most` or some more. The first run, of one, counts for nothing: it makes what a driver makes late.
pub fn seconds_per_run<E>(time: Duration, most: usize, mut run: impl FnMut(usize) -> Result<f64, E>) -> Result<f64, E> {
    run(1)?;
    let round = time.as_secs_f64() / ROUNDS as f64;
    let mut times = 1;
    let mut seconds = run(times)?;
    while seconds < round && times < most {
        times = ((times as f64 * round / seconds).ceil() as usize).clamp(times + 1, 8 * times);
        seconds = run(times)?;
    }
    let start = Instant::now();
    for _ in 1..ROUNDS {
        seconds = seconds.min(run(times)?);
        if start.elapsed() > time {
            break;
        }
    }
    Ok(seconds / times as f64)
}

/// The least of what `run` gives within `time`, after a run to warm up.
pub fn shortest<E>(time: Duration, mut run: impl FnMut() -> Result<f64, E>) -> Result<f64, E> {
    run()?;
    let start = Instant::now();
    let mut least = f64::INFINITY;
    let mut rounds = 0;
    while rounds < ROUNDS || start.elapsed() < time {
        least = least.min(run()?);
        rounds += 1;
    }
    Ok(least)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_of_the_fastest_round_count() {
        // A millisecond each, and one more for every run: rounds are of as many as fit.
        let mut counts = Vec::new();
        let seconds = seconds_per_run(Duration::from_millis(30), 64, |times| {
            counts.push(times);
            Ok::<_, ()>(1e-3 * times as f64)
        });
        assert_eq!(seconds, Ok(1e-3));
        assert_eq!(counts, [1, 1, 8, 10, 10, 10]);
        assert_eq!(seconds_per_run(Duration::from_secs(1), 2, |times| Ok::<_, ()>(1e-9 * times as f64)), Ok(1e-9));
        assert_eq!(seconds_per_run(Duration::from_secs(1), 2, |_| Err("lost")), Err("lost"));
    }

    #[test]
    fn the_first_run_warms_up() {
        let mut given = [0.5, 3.0, 2.0, 4.0].into_iter();
        assert_eq!(shortest(Duration::ZERO, || given.next().ok_or(())), Ok(2.0));
        assert_eq!(shortest(Duration::ZERO, || Err::<f64, _>(())), Err(()));
    }
}
