import { expect, test } from 'vitest';
import { bytesOnDevice, memoryOf, modelOf } from '../../src/lib/api/models';

test('a model is loaded, loading or not, by its status', () => {
  const meta = { n_ctx: 4096, size: 5, vision: false };
  const states = [{ value: 'loaded' }, { value: 'loading', progress: 0.5 }, { value: 'unloaded' }, undefined].map((status) => modelOf({ id: 'm', meta, status }, undefined, undefined));
  expect(states.map(({ loaded, loading, progress }) => [loaded, loading, progress])).toEqual([
    [true, false, undefined],
    [false, true, 0.5],
    [false, false, undefined],
    [true, false, undefined],
  ]);
  expect(modelOf({ id: 'm', meta: null }, undefined, undefined).loaded).toBe(false);
  expect(modelOf({ id: 'm', meta: null, status: { value: 'loading', progress: 7 } }, undefined, undefined).progress).toBe(1);
});

test('missing fields make no numbers', () => {
  const model = modelOf({ id: 'm' }, { name: 'm' }, { name: 'm' });
  expect(model).toMatchObject({ size: 0, memory: 0, context: 0, loaded: false, quantization: '' });
  expect('vision' in model).toBe(false);
  expect(memoryOf({})).toBeUndefined();
  expect(memoryOf({ memory: { total: 0, free: 0 } })).toBeUndefined();
  expect(memoryOf({ memory: { total: 16 } })).toBeUndefined();
  expect(memoryOf({ memory: { total: 16, free: -1 } })).toBeUndefined();
  expect(memoryOf({ memory: { total: 16, free: 20 } })).toEqual({ total: 16, free: 16 });
});

test('the account of a device has what is on the device', () => {
  const model = modelOf({ id: 'm', meta: { size: 8 } }, undefined, { name: 'm', size: 10, size_vram: 6 });
  expect(bytesOnDevice(model)).toBe(6);
  expect(bytesOnDevice({ ...model, deviceMemory: 0 })).toBe(10);
  expect(bytesOnDevice({ ...model, deviceMemory: 0, memory: 0 })).toBe(8);
});
