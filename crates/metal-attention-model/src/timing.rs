//! Repeated measurements, for the ceilings that kernels are compared with.

use std::time::{Duration, Instant};

/// Rounds of a measurement; the fastest counts.
const ROUNDS: usize = 3;

/// Seconds of one repetition: the fastest of a few rounds. `run(n)` does `n` repetitions and returns their seconds.
/// Each round has as many as take a third of `time`, but no more than about `max`. The first run, of one, is not
/// counted, as drivers finish their set-up in it.
pub fn seconds_per_run<E>(time: Duration, max: usize, mut run: impl FnMut(usize) -> Result<f64, E>) -> Result<f64, E> {
    run(1)?;
    let round = time.as_secs_f64() / ROUNDS as f64;
    let mut times = 1;
    let mut seconds = run(times)?;
    while seconds < round && times < max {
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

/// The shortest time that `run` returns within `time`, after one run to warm up.
pub fn shortest<E>(time: Duration, mut run: impl FnMut() -> Result<f64, E>) -> Result<f64, E> {
    run()?;
    let start = Instant::now();
    let mut shortest = f64::INFINITY;
    let mut rounds = 0;
    while rounds < ROUNDS || start.elapsed() < time {
        shortest = shortest.min(run()?);
        rounds += 1;
    }
    Ok(shortest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_of_the_fastest_round_count() {
        // Each takes a millisecond: rounds have as many as fit.
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
