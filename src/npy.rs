//! `NumPy`'s `.npy` files, version 1.0: a header with type and shape, then the numbers.

use std::io::{self, Write};

/// The bytes of a header: enough for any shape, so that a header can replace one of another shape.
const HEADER_BYTES: usize = 128;

/// Writes the header of a little-endian float32 matrix, row-major, `[n_rows, n_columns]`. All headers have the same length.
pub fn write_header(out: &mut impl Write, n_rows: usize, n_columns: usize) -> io::Result<()> {
    let mut header = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({n_rows}, {n_columns}), }}");
    // The ten bytes before the header, and its line break, count.
    let unpadded = 10 + header.len() + 1;
    header.extend(std::iter::repeat_n(' ', HEADER_BYTES - unpadded));
    header.push('\n');
    out.write_all(b"\x93NUMPY\x01\x00")?;
    out.write_all(&(header.len() as u16).to_le_bytes())?;
    out.write_all(header.as_bytes())
}

/// Writes the next numbers of the matrix, in row-major order.
pub fn write_numbers(out: &mut impl Write, numbers: &[f32]) -> io::Result<()> {
    numbers.iter().try_for_each(|x| out.write_all(&x.to_le_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_headers_have_the_same_length() {
        for n in [0, 1, 1_000_000, usize::MAX] {
            let mut file = Vec::new();
            write_header(&mut file, n, n).unwrap();
            assert_eq!(file.len(), HEADER_BYTES);
        }
    }

    #[test]
    fn the_header_is_as_numpy_writes_it() {
        let mut file = Vec::new();
        write_header(&mut file, 5, 512).unwrap();
        write_numbers(&mut file, &[1.0, -2.5]).unwrap();
        let dict = b"{'descr': '<f4', 'fortran_order': False, 'shape': (5, 512), }";
        assert_eq!(&file[..10], b"\x93NUMPY\x01\x00\x76\x00");
        assert_eq!(&file[10..10 + dict.len()], dict);
        assert!(file[10 + dict.len()..127].iter().all(|&b| b == b' '));
        assert_eq!(file[127], b'\n');
        assert_eq!(file[128..], [0, 0, 0x80, 0x3f, 0, 0, 0x20, 0xc0]);
    }
}
