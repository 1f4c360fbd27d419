//! Converts arguments of C: pointers that may be null, and lengths that may be wrong.

use std::ffi::{CStr, c_char};
use std::ptr::NonNull;

use crate::MA_NUL_TERMINATED;
use crate::status::{Failure, Status, call};

/// The value that `pointer` points to. An error if it is null; `name` is the argument's name.
///
/// # Safety
/// A pointer that is not null points to a `T` that does not change for `'a`.
pub unsafe fn reference<'a, T>(pointer: *const T, name: &str) -> Result<&'a T, Failure> {
    // SAFETY: as the caller promises.
    unsafe { pointer.as_ref() }.ok_or_else(|| Failure::argument(format!("{name} is a null pointer")))
}

/// The caller's memory for a `T`, which may be uninitialised.
pub struct Out<T>(NonNull<T>);

impl<T> Out<T> {
    /// Wraps `pointer`. An error if it is null.
    ///
    /// # Safety
    /// A pointer that is not null points to memory for a `T` that nothing else uses while this value exists.
    pub unsafe fn new(pointer: *mut T, name: &str) -> Result<Self, Failure> {
        NonNull::new(pointer).map(Self).ok_or_else(|| Failure::argument(format!("{name} is a null pointer")))
    }

    /// Writes `value`.
    pub fn set(&self, value: T) {
        // SAFETY: `new` was promised memory for a `T`. An earlier value is plain data and is not dropped.
        unsafe { self.0.write(value) }
    }
}

/// Drops a value that [`Box::into_raw`] returned. Null is allowed.
///
/// # Safety
/// A pointer that is not null comes from `Box::into_raw`, and nothing uses it after this.
pub unsafe fn free<T>(pointer: *mut T) {
    if !pointer.is_null() {
        // SAFETY: it comes from a box, as the caller promises.
        let value = unsafe { Box::from_raw(pointer) };
        call(|| {
            drop(value);
            Ok(())
        });
    }
}

/// The `n` values that `pointer` points to. If `n` is 0, the pointer may be null.
///
/// # Safety
/// A pointer that is not null points to `n` values that do not change for `'a`.
pub unsafe fn values<'a, T>(pointer: *const T, n: usize, name: &str) -> Result<&'a [T], Failure> {
    if n == 0 {
        return Ok(&[]);
    }
    check_size::<T>(n, name)?;
    if pointer.is_null() {
        return Err(Failure::argument(format!("{name} is a null pointer, and there should be {n} of them")));
    }
    // SAFETY: the pointer is not null and the size is valid; the caller promises the rest.
    Ok(unsafe { std::slice::from_raw_parts(pointer, n) })
}

/// An error if `n` values would be more than memory can hold.
fn check_size<T>(n: usize, name: &str) -> Result<(), Failure> {
    match n.checked_mul(size_of::<T>()).filter(|&bytes| isize::try_from(bytes).is_ok()) {
        Some(_) => Ok(()),
        None => Err(Failure::argument(format!("{name} cannot have {n} elements"))),
    }
}

/// The string of `length` bytes, or up to its NUL if `length` is [`MA_NUL_TERMINATED`]. An error if it is no UTF-8.
///
/// # Safety
/// A pointer that is not null points to `length` bytes, or to bytes that end with a NUL, that do not change for `'a`.
pub unsafe fn text<'a>(pointer: *const c_char, length: usize, name: &str) -> Result<&'a str, Failure> {
    let bytes = if length == MA_NUL_TERMINATED {
        if pointer.is_null() {
            return Err(Failure::argument(format!("{name} is a null pointer")));
        }
        // SAFETY: the pointer is not null, and a NUL follows, as the caller promises.
        unsafe { CStr::from_ptr(pointer) }.to_bytes()
    } else {
        // SAFETY: as the caller promises.
        unsafe { values(pointer.cast(), length, name) }?
    };
    std::str::from_utf8(bytes).map_err(|error| Failure::argument(format!("{name} is no UTF-8: {error}")))
}

/// The `n` strings that `pointer` points to; each ends with a NUL.
///
/// # Safety
/// A pointer that is not null points to `n` pointers, each of which is null or points to a string that ends with a NUL.
pub unsafe fn strings(pointer: *const *const c_char, n: usize, name: &str) -> Result<Vec<String>, Failure> {
    // SAFETY: there are `n`, as the caller promises.
    let pointers = unsafe { values(pointer, n, name) }?;
    // SAFETY: each ends with a NUL, as the caller promises.
    let owned = |&each: &*const c_char| Ok(unsafe { text(each, MA_NUL_TERMINATED, name) }?.to_owned());
    pointers.iter().map(owned).collect()
}

/// Copies `from` to the buffer `to`, which has room for `capacity` values, and writes their number to `n`. If they do not fit,
/// only `n` is written, and the error is `BufferTooSmall`.
///
/// # Safety
/// `to` is null, or points to memory for `capacity` values that nothing else uses now.
pub unsafe fn fill<T: Copy>(from: &[T], to: *mut T, capacity: usize, n: &Out<usize>) -> Result<(), Failure> {
    n.set(from.len());
    if from.len() > capacity || to.is_null() && !from.is_empty() {
        let message = format!("there are {}, and there is room for {capacity}", from.len());
        return Err(Failure::new(Status::BufferTooSmall, message));
    }
    if !from.is_empty() {
        // SAFETY: there is room, as the caller promises, and `from` is memory of this library, so that the two do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to, from.len()) };
    }
    Ok(())
}

/// A struct of options, whose first member is its size. `None`: the pointer is null. An error if the size is another one.
///
/// # Safety
/// A pointer that is not null points to a size, and if that is the size of a `T`, to a `T`, for `'a`.
pub unsafe fn options<'a, T>(pointer: *const T, name: &str) -> Result<Option<&'a T>, Failure> {
    if pointer.is_null() {
        return Ok(None);
    }
    // SAFETY: a size comes first, as the caller promises.
    let size = unsafe { pointer.cast::<usize>().read() };
    check_struct::<T>(size, name)?;
    // SAFETY: it is a `T`, by its size.
    Ok(Some(unsafe { &*pointer }))
}

/// An error if the size of a caller's struct differs from its size in this library.
pub fn check_struct<T>(size: usize, name: &str) -> Result<(), Failure> {
    if size == size_of::<T>() {
        return Ok(());
    }
    let expected = size_of::<T>();
    Err(Failure::argument(format!(
        "{name} has {size} bytes instead of {expected}: ma_{name}_default sets them, and program and library must be of one \
         version"
    )))
}
