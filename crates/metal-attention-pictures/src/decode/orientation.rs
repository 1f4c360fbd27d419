//! The EXIF tag "orientation": how the stored picture lies.

use crate::Picture;

/// The steps from the picture as it should be seen to the stored one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Orientation {
    /// Rows are stored as columns.
    transposed: bool,
    /// Stored columns run from right to left, after the transposition.
    flipped_x: bool,
    /// Stored rows run from bottom to top, after the transposition.
    flipped_y: bool,
}

/// The values 1 to 8 of the tag (EXIF 2.3, 4.6.4 A).
const ORIENTATIONS: [Orientation; 8] = [
    Orientation { transposed: false, flipped_x: false, flipped_y: false },
    Orientation { transposed: false, flipped_x: true, flipped_y: false },
    Orientation { transposed: false, flipped_x: true, flipped_y: true },
    Orientation { transposed: false, flipped_x: false, flipped_y: true },
    Orientation { transposed: true, flipped_x: false, flipped_y: false },
    Orientation { transposed: true, flipped_x: false, flipped_y: true },
    Orientation { transposed: true, flipped_x: true, flipped_y: true },
    Orientation { transposed: true, flipped_x: true, flipped_y: false },
];

impl Orientation {
    /// The orientation in EXIF data, upright where there is none or the data is damaged.
    pub fn of_exif(exif: Option<&[u8]>) -> Self {
        let value = exif.and_then(orientation_tag).unwrap_or(1);
        *ORIENTATIONS.get(value.wrapping_sub(1)).unwrap_or(&ORIENTATIONS[0])
    }

    /// The stored picture turned upright.
    pub fn upright(self, stored: Picture) -> Picture {
        if self == ORIENTATIONS[0] {
            return stored;
        }
        let (last_x, last_y) = (stored.width() - 1, stored.height() - 1);
        let (width, height) =
            if self.transposed { (stored.height(), stored.width()) } else { (stored.width(), stored.height()) };
        let mut upright = Picture::filled(width, height, [0; 3]);
        let (pixels, _) = upright.rgb_mut().as_chunks_mut::<3>();
        for (i, pixel) in pixels.iter_mut().enumerate() {
            let (x, y) = if self.transposed { (i / width, i % width) } else { (i % width, i / width) };
            let x = if self.flipped_x { last_x - x } else { x };
            let y = if self.flipped_y { last_y - y } else { y };
            pixel.copy_from_slice(&stored.row(y)[x * 3..x * 3 + 3]);
        }
        upright
    }
}

/// The value of the tag in EXIF data: a TIFF header, and a directory of entries of 12 bytes.
fn orientation_tag(exif: &[u8]) -> Option<usize> {
    const ORIENTATION: usize = 0x0112;
    let tiff = exif.strip_prefix(b"Exif\0\0").unwrap_or(exif);
    let is_little = tiff.starts_with(b"II");
    let number = |at: usize, len: usize| {
        let field = tiff.get(at..at.checked_add(len)?)?;
        let add = |number: usize, byte: &u8| number << 8 | usize::from(*byte);
        Some(if is_little { field.iter().rev().fold(0, add) } else { field.iter().fold(0, add) })
    };
    let directory = number(4, 4)?;
    let entries = (0..number(directory, 2)?).map(|i| directory + 2 + i * 12);
    let entry = entries.take_while(|at| *at < tiff.len()).find(|at| number(*at, 2) == Some(ORIENTATION))?;
    number(entry + 8, 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_turn_as_exif_says() {
        // Rows "12", "34", "56", of which each pixel is three equal bytes.
        let stored = Picture::new(2, 3, b"123456".iter().flat_map(|byte| [*byte; 3]).collect()).unwrap();
        // 2: mirrored; 3: by 180 degrees; 4: upside down mirrored; 6: clockwise; 8: counterclockwise.
        let expected = ["123456", "214365", "654321", "563412", "135246", "531642", "642531", "246135"];
        for (orientation, expected) in ORIENTATIONS.iter().zip(expected) {
            let upright = orientation.upright(stored.clone());
            let first: Vec<_> = upright.rgb().iter().step_by(3).copied().collect();
            assert_eq!(first, expected.as_bytes(), "{orientation:?}");
            assert_eq!(upright.width() == 3, orientation.transposed);
        }
    }

    #[test]
    fn both_byte_orders_are_read() {
        let little = b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0";
        let big = b"MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0";
        for exif in [&little[..], big] {
            assert_eq!(orientation_tag(exif), Some(6));
            for len in 0..exif.len() {
                let _ = orientation_tag(&exif[..len]);
            }
        }
        assert_eq!(Orientation::of_exif(Some(b"MM\0*\xff\xff\xff\xff")), ORIENTATIONS[0]);
        assert_eq!(Orientation::of_exif(None), ORIENTATIONS[0]);
    }
}
