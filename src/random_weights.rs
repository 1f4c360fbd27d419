//! Random numbers for weights of untrained models: of plausible size, so that activations stay finite, and the same on every
//! machine for the same seed.

/// The generator `SplitMix64` (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators"), with its state.
#[derive(Clone)]
pub struct RandomWeights(u64);

/// The constant that is added to the state for each number.
const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

impl RandomWeights {
    /// The numbers for the tensor at index `tensor` of a file made from `seed`.
    pub fn new(seed: u64, tensor: usize) -> Self {
        let mut first = Self(seed);
        let start = first.next();
        Self(start ^ (tensor as u64).wrapping_mul(0xd129_0d3e_5e5b_9a63))
    }

    /// The generator after `n` further numbers.
    pub fn skip(self, n: usize) -> Self {
        Self(self.0.wrapping_add(GAMMA.wrapping_mul(n as u64)))
    }

    /// Fills `out` with numbers of this mean and standard deviation. Each is the sum of four uniform numbers, which is close to
    /// normal and bounded by 3.5 standard deviations.
    pub fn fill(&mut self, out: &mut [f32], mean: f32, std: f32) {
        // Four 16-bit uniform numbers: mean 4 * 32767.5, variance 4 * 2^32 / 12.
        let scale = std / (65_536.0 * (1.0f32 / 3.0).sqrt());
        for x in out {
            let bits = self.next();
            let sum = (bits & 0xffff) + (bits >> 16 & 0xffff) + (bits >> 32 & 0xffff) + (bits >> 48);
            *x = mean + (sum as f32 - 131_070.0) * scale;
        }
    }

    /// The next 64 bits.
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(GAMMA);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mean_and_deviation_are_right_and_seeds_differ() {
        let mut x = vec![0.0; 100_000];
        RandomWeights::new(7, 3).fill(&mut x, 1.0, 0.25);
        let mean = x.iter().sum::<f32>() / x.len() as f32;
        let var = x.iter().map(|v| (v - mean).powi(2)).sum::<f32>() / x.len() as f32;
        assert!((mean - 1.0).abs() < 0.003 && (var.sqrt() - 0.25).abs() < 0.002, "{mean} {var}");
        let mut again = vec![0.0; 100_000];
        RandomWeights::new(7, 3).fill(&mut again, 1.0, 0.25);
        assert_eq!(x, again);
        RandomWeights::new(7, 4).fill(&mut again, 1.0, 0.25);
        assert_ne!(x[..8], again[..8]);
        RandomWeights::new(7, 3).skip(99_000).fill(&mut again[..1000], 1.0, 0.25);
        assert_eq!(x[99_000..], again[..1000]);
    }

    #[test]
    fn the_generator_matches_its_paper() {
        // First outputs for the seed 1234567 (the reference implementation's).
        let mut r = RandomWeights(1_234_567);
        assert_eq!([r.next(), r.next(), r.next()], [6457827717110365317, 3203168211198807973, 9817491932198370423]);
    }
}
