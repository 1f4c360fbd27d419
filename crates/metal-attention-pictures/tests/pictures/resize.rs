//! Resizing against the formula in F64.

use std::f64::consts::PI;

use metal_attention_pictures::{Filter, MAX_SIDE, Picture, PictureError};

use super::Random;

const FILTERS: [Filter; 3] = [Filter::Bilinear, Filter::Bicubic, Filter::Lanczos];

fn weight(filter: Filter, x: f64) -> f64 {
    let x = x.abs();
    match filter {
        Filter::Bilinear => (1.0 - x).max(0.0),
        Filter::Bicubic if x < 1.0 => 1.5 * x.powi(3) - 2.5 * x.powi(2) + 1.0,
        Filter::Bicubic if x < 2.0 => -0.5 * x.powi(3) + 2.5 * x.powi(2) - 4.0 * x + 2.0,
        Filter::Lanczos if x == 0.0 => 1.0,
        Filter::Lanczos if x < 3.0 => 3.0 * (PI * x).sin() * (PI * x / 3.0).sin() / (PI * x).powi(2),
        Filter::Bicubic | Filter::Lanczos => 0.0,
    }
}

/// One pass over a side of `from` values, rounded to bytes.
fn pass(values: &[f64], to: usize, filter: Filter) -> Vec<f64> {
    if values.len() == to {
        return values.to_vec();
    }
    let scale = values.len() as f64 / to as f64;
    let value = |i: usize| {
        let centre = (i as f64 + 0.5) * scale - 0.5;
        let weights: Vec<_> =
            (0..values.len()).map(|at| weight(filter, (at as f64 - centre) / scale.max(1.0))).collect();
        let sum: f64 = values.iter().zip(&weights).map(|(value, weight)| value * weight).sum();
        (sum / weights.iter().sum::<f64>()).round().clamp(0.0, 255.0)
    };
    (0..to).map(value).collect()
}

/// The picture resized, channel by channel.
fn twin(picture: &Picture, width: usize, height: usize, filter: Filter) -> Vec<f64> {
    let mut rgb = vec![0.0; width * height * 3];
    for c in 0..3 {
        let channel = |y: usize| picture.row(y).iter().skip(c).step_by(3).map(|byte| f64::from(*byte));
        let rows: Vec<_> =
            (0..picture.height()).map(|y| pass(&channel(y).collect::<Vec<_>>(), width, filter)).collect();
        for x in 0..width {
            let column: Vec<_> = rows.iter().map(|row| row[x]).collect();
            for (y, value) in pass(&column, height, filter).into_iter().enumerate() {
                rgb[(y * width + x) * 3 + c] = value;
            }
        }
    }
    rgb
}

#[test]
fn resizing_is_within_a_level_of_its_formula() {
    let mut random = Random(7);
    let mut sizes: Vec<_> = (0..20).map(|_| [60; 4].map(|most| random.up_to(most))).collect();
    sizes.extend([[1, 1, 5, 7], [1, 300, 9, 9], [3000, 2, 11, 3], [9, 9, 9, 4], [9, 9, 4, 9], [5, 5, 5, 5]]);
    for [from_width, from_height, width, height] in sizes {
        let picture = random.picture(from_width, from_height);
        for filter in FILTERS {
            let resized = picture.resized(width, height, filter).unwrap();
            assert_eq!((resized.width(), resized.height()), (width, height));
            let expected = twin(&picture, width, height, filter);
            let differences = resized.rgb().iter().zip(&expected).map(|(byte, value)| (f64::from(*byte) - value).abs());
            let largest = differences.fold(0.0, f64::max);
            // A level in the first pass may become one in the second.
            assert!(largest <= 1.0, "{from_width} x {from_height} to {width} x {height}, {filter:?}: {largest}");
        }
    }
}

#[test]
fn one_colour_stays() {
    let picture = Picture::new(50, 40, [10, 128, 255].repeat(2000)).unwrap();
    for filter in FILTERS {
        let resized = picture.resized(33, 90, filter).unwrap();
        assert_eq!(resized.rgb(), [10, 128, 255].repeat(33 * 90));
    }
}

#[test]
fn fitted_pictures_are_centred() {
    let picture = Picture::new(4, 2, vec![9; 24]).unwrap();
    let fitted = picture.fitted(8, 7, Filter::Bicubic, [1, 2, 3]).unwrap();
    let rows: Vec<_> = (0..7).map(|y| fitted.row(y)[0]).collect();
    assert_eq!(rows, [1, 9, 9, 9, 9, 1, 1]);
    assert_eq!(fitted.row(0)[..3], [1, 2, 3]);
    assert_eq!(picture.fitted(4, 2, Filter::Bicubic, [1; 3]).unwrap(), picture);
}

#[test]
fn impossible_targets_are_errors() {
    let picture = Picture::new(1, 30000, vec![9; 90000]).unwrap();
    for (width, height) in [(0, 5), (5, 0), (MAX_SIDE + 1, 1), (MAX_SIDE, MAX_SIDE), (usize::MAX, 2), (MAX_SIDE, 1)] {
        let expected = PictureError::TargetSize { from_width: 1, from_height: 30000, width, height };
        assert_eq!(picture.resized(width, height, Filter::Lanczos), Err(expected.clone()));
        assert_eq!(picture.fitted(width, height, Filter::Lanczos, [0; 3]), Err(expected));
    }
}

#[test]
fn digests_tell_sizes_and_pixels_apart() {
    let picture = |width, height, value| Picture::new(width, height, vec![value; 18]).unwrap().digest();
    assert_eq!(picture(3, 2, 1), picture(3, 2, 1));
    assert_ne!(picture(3, 2, 1), picture(2, 3, 1));
    assert_ne!(picture(3, 2, 1), picture(3, 2, 2));
}

/// `cargo test --release -p metal-attention-pictures -- --ignored --nocapture twelve`.
#[test]
#[ignore = "measures time"]
fn twelve_megapixels_shrink_to_one() {
    let picture = Picture::new(4000, 3000, (0..36_000_000).map(|i| (i / 7) as u8).collect()).unwrap();
    for filter in FILTERS {
        let start = std::time::Instant::now();
        let resized = picture.resized(1155, 866, filter).unwrap();
        println!("{filter:?}: {:?}, byte {}", start.elapsed(), resized.rgb()[1000]);
    }
    let start = std::time::Instant::now();
    println!("digest {:?}: {:?}", &picture.digest()[..2], start.elapsed());
}
