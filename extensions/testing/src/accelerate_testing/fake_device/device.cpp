// An accelerator for tests, in host memory. See docs/devices.md and docs/decisions/037-a-device-in-cpp.md.
//
// Kernels run at once, on CPU tensors that share the memory of the device's tensors. What a real device
// would do later on a stream is only recorded: the log contains every kernel, copy, host read,
// synchronization, event and collective in the order in which the host issued them.
#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::IValue;
using c10::Stream;
constexpr auto kDevice = c10::DeviceType::PrivateUse1;

// ---- the log ----

struct Entry {
  const char* kind;
  std::string name;
  int device;
  int64_t stream;
  int64_t bytes;
  std::string where;
};

// A stream is named by its device and its number.
using StreamKey = std::pair<int, int64_t>;
// For each stream, the number of its last piece of work that is known to be finished.
using Clock = std::map<StreamKey, uint64_t>;

void merge(Clock& into, const Clock& from) {
  for (auto& [key, number] : from) {
    into[key] = std::max(into[key], number);
  }
}

// The last work of each stream that uses some memory.
using Uses = std::map<StreamKey, uint64_t>;

struct Block {
  size_t size;
  StreamKey owner;
  Uses freed; // uses of a freed tensor that had this memory before
  Uses reads;
  std::pair<StreamKey, uint64_t> write{};
  std::set<StreamKey> recorded;
};

// A freed block. Its owner's stream may reuse the memory at once, as in torch's caching allocators.
struct Cached {
  void* pointer;
  Uses uses;
};

struct Memory {
  size_t limit = 0; // 0 means unlimited
  std::multimap<std::pair<StreamKey, size_t>, Cached> cached;
  c10::CachingDeviceAllocator::DeviceStats stats;
};

struct State {
  std::recursive_mutex mutex;
  DeviceIndex devices = 1;
  std::vector<Memory> memory;
  std::vector<at::Generator> generators;
  std::map<char*, Block> blocks;
  std::map<char*, size_t> pinned;
  std::map<StreamKey, uint64_t> issued;
  std::map<StreamKey, Clock> seen;
  Clock host; // what the host has waited for
  bool recording = false;
  std::vector<Entry> log;
  std::map<std::string, int64_t> counts;
  py::object stack; // a Python function that describes the calling line
};

State& state() {
  static auto* made = new State(); // never destroyed: tensors may outlive static objects
  return *made;
}

using Lock = std::lock_guard<std::recursive_mutex>;

thread_local DeviceIndex current_device = 0;
thread_local std::map<int, int64_t> current_streams;

StreamKey current_stream(int device) {
  return {device, current_streams[device]};
}

std::string calling_line() {
  if (!state().recording || !Py_IsInitialized()) {
    return "";
  }
  py::gil_scoped_acquire gil;
  return state().stack ? state().stack().cast<std::string>() : "";
}

void note(const char* kind, std::string name, StreamKey stream, int64_t bytes = 0, std::string where = "") {
  Lock lock(state().mutex);
  state().counts[kind] += 1;
  if (bytes != 0) {
    state().counts[std::string(kind) + "_bytes"] += bytes;
  }
  if (state().recording) {
    state().log.push_back({kind, std::move(name), stream.first, stream.second, bytes, std::move(where)});
  }
}

void note_blocking(const char* kind, std::string name, StreamKey stream, int64_t bytes = 0) {
  note(kind, std::move(name), stream, bytes, calling_line()); // the GIL is never acquired under the lock
}

// ---- which work may overlap ----

uint64_t issue(StreamKey stream) {
  return ++state().issued[stream];
}

bool finished(StreamKey stream, StreamKey other, uint64_t number) {
  auto& state_ = state();
  return number == 0 || stream == other || state_.seen[stream][other] >= number || state_.host[other] >= number;
}

Block* block_of(const void* pointer) {
  auto& blocks = state().blocks;
  auto after = blocks.upper_bound(static_cast<char*>(const_cast<void*>(pointer)));
  if (after == blocks.begin()) {
    return nullptr;
  }
  auto found = std::prev(after);
  return pointer < found->first + std::max<size_t>(found->second.size, 1) ? &found->second : nullptr;
}

// Report work on other streams that may still be using memory when it is written for a new tensor.
void check_reuse(Block& block, StreamKey stream, const std::string& name) {
  for (auto& [other, number] : block.freed) {
    if (!finished(stream, other, number)) {
      note("race", name + " reuses freed memory that another stream may still use; record_stream was not called", stream);
    }
  }
  block.freed.clear();
}

// Record that a stream uses memory, and report work on other streams that may still be using it.
void use(const Tensor& tensor, StreamKey stream, uint64_t number, bool writes, const std::string& name) {
  if (!tensor.has_storage() || tensor.storage().nbytes() == 0) {
    return;
  }
  Block* block = block_of(tensor.storage().data());
  if (block == nullptr) {
    return;
  }
  if (!finished(stream, block->write.first, block->write.second)) {
    note("race", name + (writes ? " writes" : " reads") + " memory before another stream has written it", stream);
  }
  if (writes) {
    check_reuse(*block, stream, name);
    for (auto& [other, at] : block->reads) {
      if (!finished(stream, other, at)) {
        note("race", name + " writes memory that another stream still reads", stream);
      }
    }
    block->reads.clear();
    block->write = {stream, number};
  } else {
    block->reads[stream] = number;
  }
}

// ---- memory ----

void add(c10::CachingAllocator::StatArray& stat, int64_t amount) {
  auto& all = stat[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
  amount >= 0 ? all.increase(amount) : all.decrease(-amount);
}

int64_t reserved(DeviceIndex device) {
  return state().memory[device].stats.reserved_bytes[0].current;
}

void free_block(void* pointer);

struct FakeAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    Lock lock(state().mutex);
    Device device(kDevice, current_device);
    auto& memory = state().memory[current_device];
    auto owner = current_stream(current_device);
    void* pointer = nullptr;
    Uses freed;
    auto kept = memory.cached.find({owner, size});
    if (size > 0 && kept != memory.cached.end()) {
      pointer = kept->second.pointer;
      freed = std::move(kept->second.uses);
      memory.cached.erase(kept);
    } else if (size > 0) {
      if (memory.limit != 0 && reserved(current_device) + size > memory.limit) {
        memory.stats.num_alloc_retries += 1;
        drop_cached(current_device);
      }
      if (memory.limit != 0 && reserved(current_device) + size > memory.limit) {
        memory.stats.num_ooms += 1;
        TORCH_CHECK_WITH(
            OutOfMemoryError, false, "fake out of memory. Tried to allocate ", size, " bytes. Device ",
            int(current_device), " has a total capacity of ", memory.limit, " bytes, of which ",
            memory.limit - reserved(current_device), " bytes are free.");
      }
      pointer = std::malloc(size);
      TORCH_CHECK_WITH(OutOfMemoryError, pointer != nullptr, "The host has no ", size, " bytes of memory left.");
      memory.stats.num_device_alloc += 1;
      add(memory.stats.reserved_bytes, size);
    }
    if (pointer != nullptr) {
      std::memset(pointer, 0xAB, size); // so that a test notices when uninitialised memory is used
      state().blocks[static_cast<char*>(pointer)] = {size, owner, std::move(freed)};
      for (auto* stat : {&memory.stats.allocated_bytes, &memory.stats.active_bytes, &memory.stats.requested_bytes}) {
        add(*stat, size);
      }
      add(memory.stats.allocation, 1);
    }
    return {pointer, pointer, &free_block, device};
  }

  static void drop_cached(DeviceIndex device) {
    auto& memory = state().memory[device];
    for (auto& [key, cached] : memory.cached) {
      std::free(cached.pointer);
      add(memory.stats.reserved_bytes, -static_cast<int64_t>(key.second));
      memory.stats.num_device_free += 1;
    }
    memory.cached.clear();
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t count) const override { default_copy_data(to, from, count); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    Lock lock(state().mutex);
    for (DeviceIndex device = 0; device < state().devices; ++device) {
      drop_cached(device);
    }
  }
  void recordStream(const c10::DataPtr& pointer, Stream stream) override {
    Lock lock(state().mutex);
    if (Block* block = block_of(pointer.get())) {
      block->recorded.insert({stream.device_index(), stream.id()});
    }
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    return state().memory.at(device).stats;
  }
  void resetAccumulatedStats(DeviceIndex device) override { each_stat(device, &c10::CachingAllocator::Stat::reset_accumulated); }
  void resetPeakStats(DeviceIndex device) override { each_stat(device, &c10::CachingAllocator::Stat::reset_peak); }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    auto& memory = state().memory.at(device);
    size_t total = memory.limit != 0 ? memory.limit : size_t(1) << 40;
    return {total - reserved(device), total};
  }

 private:
  void each_stat(DeviceIndex device, void (c10::CachingAllocator::Stat::*reset)()) {
    Lock lock(state().mutex);
    auto& stats = state().memory.at(device).stats;
    for (auto* stat : {&stats.allocation, &stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes,
                       &stats.requested_bytes}) {
      for (auto& one : *stat) {
        (one.*reset)();
      }
    }
  }
};

FakeAllocator& allocator() {
  static auto* made = new FakeAllocator();
  return *made;
}

void free_block(void* pointer) {
  if (pointer == nullptr) {
    return;
  }
  Lock lock(state().mutex);
  auto found = state().blocks.find(static_cast<char*>(pointer));
  Block block = found->second;
  state().blocks.erase(found);
  Uses uses = std::move(block.freed);
  merge(uses, block.reads);
  merge(uses, {block.write});
  for (auto& stream : block.recorded) {
    uses.erase(stream); // torch's caching allocators reuse the memory after these streams have finished
  }
  auto& memory = state().memory[block.owner.first];
  auto size = static_cast<int64_t>(block.size);
  for (auto* stat : {&memory.stats.allocated_bytes, &memory.stats.active_bytes, &memory.stats.requested_bytes}) {
    add(*stat, -size);
  }
  add(memory.stats.allocation, -1);
  memory.cached.insert({{block.owner, block.size}, {pointer, std::move(uses)}});
}

// Pinned host memory.
void free_pinned(void* pointer) {
  Lock lock(state().mutex);
  state().pinned.erase(static_cast<char*>(pointer));
  std::free(pointer);
}

struct PinnedAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t size) override {
    Lock lock(state().mutex);
    void* pointer = size > 0 ? std::malloc(size) : nullptr;
    if (pointer != nullptr) {
      state().pinned[static_cast<char*>(pointer)] = size;
    }
    note("pin", "pin_memory", current_stream(current_device), size);
    return {pointer, pointer, pointer != nullptr ? &free_pinned : &c10::detail::deleteNothing, Device(c10::kCPU)};
  }
  void copy_data(void* to, const void* from, size_t count) const override { default_copy_data(to, from, count); }
  bool record_event(void*, void*, Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

PinnedAllocator& pinned_allocator() {
  static auto* made = new PinnedAllocator();
  return *made;
}

bool is_pinned(const void* pointer) {
  Lock lock(state().mutex);
  auto& pinned = state().pinned;
  auto after = pinned.upper_bound(static_cast<char*>(const_cast<void*>(pointer)));
  return after != pinned.begin() && pointer < std::prev(after)->first + std::prev(after)->second;
}

// ---- generators ----

// A generator of the device. Kernels run on the CPU, so it has a CPU generator inside.
struct FakeGenerator final : c10::GeneratorImpl {
  explicit FakeGenerator(DeviceIndex index, at::Generator inner)
      : GeneratorImpl(Device(kDevice, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), inner(std::move(inner)) {}
  explicit FakeGenerator(DeviceIndex index) : FakeGenerator(index, at::globalContext().defaultGenerator(c10::kCPU).clone()) {
    set_current_seed(c10::default_rng_seed_val);
  }
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { inner.set_offset(offset); }
  uint64_t get_offset() const override { return inner.get_offset(); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  FakeGenerator* clone_impl() const override { return new FakeGenerator(device_.index(), inner.clone()); }
  at::Generator inner;
};

const at::Generator& default_generator(DeviceIndex device) {
  return state().generators.at(device < 0 ? current_device : device);
}

at::Generator cpu_generator(const at::Generator& generator) {
  return static_cast<FakeGenerator*>(generator.unsafeGetGeneratorImpl())->inner;
}

// ---- tensors ----

bool is_fake(const Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kDevice;
}

Tensor make_empty(c10::IntArrayRef size, DeviceIndex device, c10::ScalarType dtype,
                  std::optional<c10::MemoryFormat> format = std::nullopt) {
  c10::OptionalDeviceGuard guard(Device(kDevice, device < 0 ? current_device : device));
  return at::detail::empty_generic(size, &allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype, format);
}

Tensor make_strided(c10::IntArrayRef size, c10::IntArrayRef stride, DeviceIndex device, c10::ScalarType dtype) {
  c10::OptionalDeviceGuard guard(Device(kDevice, device < 0 ? current_device : device));
  return at::detail::empty_strided_generic(size, stride, &allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype);
}

// A CPU tensor in the same memory. It doesn't own the memory.
Tensor on_cpu(const Tensor& tensor) {
  if (!is_fake(tensor)) {
    return tensor;
  }
  auto& storage = tensor.storage();
  c10::Storage shared(c10::Storage::use_byte_size_t(), storage.nbytes(),
                      c10::DataPtr(storage.mutable_data(), Device(c10::kCPU)), c10::GetCPUAllocator(), true);
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(shared), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_storage_offset(tensor.storage_offset());
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  if (tensor.is_conj()) {
    impl->_set_conj(true);
  }
  if (tensor.is_neg()) {
    impl->_set_neg(true);
  }
  return made;
}

void grow(const c10::Storage& storage, size_t size) {
  if (size == storage.nbytes()) {
    return;
  }
  c10::OptionalDeviceGuard guard(storage.device());
  auto memory = allocator().allocate(size);
  if (size > 0 && storage.nbytes() > 0) {
    std::memcpy(memory.get(), storage.data(), std::min(size, storage.nbytes()));
  }
  storage.set_data_ptr(std::move(memory));
  storage.set_nbytes(size);
}

void set_geometry(const Tensor& tensor, c10::IntArrayRef size, c10::IntArrayRef stride, int64_t offset) {
  auto* impl = tensor.unsafeGetTensorImpl();
  size_t needed = at::detail::computeStorageNbytes(size, stride, tensor.dtype().itemsize(), offset);
  if (needed > impl->storage().nbytes()) {
    grow(impl->storage(), needed);
  }
  impl->set_storage_offset(offset);
  impl->set_sizes_and_strides(size, stride);
}

Tensor on_device(const Tensor& result, DeviceIndex device) {
  auto made = make_strided(result.sizes(), result.strides(), device, result.scalar_type());
  if (result.storage().nbytes() > 0) {
    std::memcpy(made.storage().mutable_data(), static_cast<const char*>(result.storage().data()) +
                    result.storage_offset() * result.itemsize(), made.storage().nbytes());
  }
  return made;
}

// ---- kernels ----

// Operators that wait for the device, because the size of their result, or the result itself, is on the host.
bool reads_back(const std::string& name) {
  static const std::set<std::string> names{
      "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
      "aten::equal", "aten::repeat_interleave", "aten::bincount", "aten::nonzero_static", "aten::is_nonzero",
      "aten::_linalg_check_errors", "aten::histc"};
  return names.count(name) != 0;
}

// Operators that accept indices on the CPU.
bool takes_cpu_indices(const std::string& name) {
  return name.rfind("aten::index", 0) == 0 || name.rfind("aten::_index_put_impl_", 0) == 0;
}

// One call of the fallback.
struct Call {
  struct Pair {
    Tensor real, cpu;
    bool written;
  };
  std::string name;
  int device = -1;
  std::vector<Pair> pairs;

  void on(DeviceIndex index) {
    TORCH_CHECK(device < 0 || index == device, "Expected all tensors to be on the same device, but ", name,
                " got tensors on fake:", device, " and fake:", int(index));
    device = index;
  }

  Tensor enter(const Tensor& tensor, bool written) {
    if (!tensor.defined()) {
      return tensor;
    }
    if (!is_fake(tensor)) {
      pairs.push_back({tensor, tensor, false});
      return tensor;
    }
    on(tensor.device().index());
    for (auto& pair : pairs) {
      if (pair.real.is_same(tensor)) {
        pair.written |= written;
        return pair.cpu;
      }
    }
    pairs.push_back({tensor, on_cpu(tensor), written});
    return pairs.back().cpu;
  }

  IValue enter(const IValue& value, bool written) {
    if (value.isTensor()) {
      return enter(value.toTensor(), written);
    }
    if (value.isTensorList()) {
      c10::List<Tensor> made;
      for (const Tensor& one : value.toTensorVector()) {
        made.push_back(enter(one, written));
      }
      return made;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> made;
      for (const std::optional<Tensor>& one : value.toOptionalTensorVector()) {
        made.push_back(one ? std::optional<Tensor>(enter(*one, written)) : one);
      }
      return made;
    }
    if (value.isDevice() && value.toDevice().type() == kDevice) {
      auto index = value.toDevice().index();
      on(index < 0 ? current_device : index);
      return Device(c10::kCPU);
    }
    return value;
  }

  Tensor leave(const Tensor& result) {
    if (!result.defined()) {
      return result;
    }
    for (auto& pair : pairs) {
      if (pair.cpu.is_same(result)) {
        return pair.real;
      }
    }
    for (auto& pair : pairs) { // a view of an argument
      if (is_fake(pair.real) && result.storage().nbytes() > 0 && result.storage().data() == pair.cpu.storage().data()) {
        auto made = at::detail::make_tensor<c10::TensorImpl>(
            c10::TensorImpl::VIEW, c10::Storage(pair.real.storage()), pair.real.key_set(), result.dtype());
        made.unsafeGetTensorImpl()->set_storage_offset(result.storage_offset());
        made.unsafeGetTensorImpl()->set_sizes_and_strides(result.sizes(), result.strides());
        return made;
      }
    }
    return on_device(result, device);
  }

  IValue leave(const IValue& value) {
    if (value.isTensor()) {
      return leave(value.toTensor());
    }
    if (value.isTensorList()) {
      c10::List<Tensor> made;
      for (const Tensor& one : value.toTensorVector()) {
        made.push_back(leave(one));
      }
      return made;
    }
    return value;
  }

  // A kernel may have resized an `out` argument.
  void resize() {
    for (auto& pair : pairs) {
      if (!pair.written || pair.cpu.sizes() == pair.real.sizes()) {
        continue;
      }
      set_geometry(pair.real, pair.cpu.sizes(), pair.cpu.strides(), pair.cpu.storage_offset());
      if (pair.cpu.storage().data() != pair.real.storage().data() && pair.cpu.storage().nbytes() > 0) {
        std::memcpy(pair.real.storage().mutable_data(), pair.cpu.storage().data(),
                    std::min(pair.cpu.storage().nbytes(), pair.real.storage().nbytes()));
      }
    }
  }

  void check_devices() {
    if (takes_cpu_indices(name)) {
      return;
    }
    for (auto& pair : pairs) {
      TORCH_CHECK(is_fake(pair.real) || pair.real.dim() == 0,
                  "Expected all tensors to be on the same device, but ", name, " got tensors on fake:", device, " and cpu");
    }
  }

  // Record the kernel on the current stream of its device.
  void launch() {
    Lock lock(state().mutex);
    auto stream = current_stream(device);
    auto number = issue(stream);
    note("kernel", name, stream);
    for (bool writes : {false, true}) {
      for (auto& pair : pairs) {
        if (is_fake(pair.real) && pair.written == writes) {
          use(pair.real, stream, number, writes, name);
        }
      }
    }
  }
};

// `other` is the operator to call instead, with the same arguments.
void run(const c10::OperatorHandle& op, torch::jit::Stack* stack, const c10::OperatorHandle& other) {
  const auto& schema = op.schema();
  Call call;
  call.name = schema.name();
  auto count = schema.arguments().size();
  auto begin = stack->size() - count;
  std::vector<size_t> generators;
  bool masks = false;
  for (size_t i = 0; i < count; ++i) {
    const auto& argument = schema.arguments()[i];
    auto& value = (*stack)[begin + i];
    const auto* info = argument.alias_info();
    value = call.enter(value, info != nullptr && info->isWrite());
    if (argument.type()->isSubtypeOf(*c10::OptionalType::create(c10::GeneratorType::get()))) {
      generators.push_back(begin + i);
    }
  }
  if (call.device < 0) {
    call.device = current_device;
  }
  for (auto at : generators) {
    auto& value = (*stack)[at];
    value = cpu_generator(value.isNone() ? default_generator(call.device) : value.toGenerator());
  }
  call.check_devices();
  if (takes_cpu_indices(call.name)) {
    for (auto& pair : call.pairs) {
      masks |= is_fake(pair.real) && pair.real.scalar_type() == at::kBool && pair.real.dim() > 0 && !pair.written &&
          !pair.real.is_same(call.pairs[0].real);
    }
  }
  call.launch();
  if (masks || reads_back(call.name)) {
    note_blocking("read", call.name, current_stream(call.device));
    Lock lock(state().mutex);
    state().host[current_stream(call.device)] = state().issued[current_stream(call.device)];
  }
  other.callBoxed(stack);
  call.resize();
  auto first = stack->size() - schema.returns().size();
  auto stream = current_stream(call.device);
  for (size_t i = first; i < stack->size(); ++i) {
    (*stack)[i] = call.leave((*stack)[i]);
    Lock lock(state().mutex);
    if ((*stack)[i].isTensor() && is_fake((*stack)[i].toTensor())) {
      Block* block = block_of((*stack)[i].toTensor().storage().data());
      if (block != nullptr && block->write.second == 0) {
        check_reuse(*block, stream, call.name);
        block->write = {stream, state().issued[stream]};
      }
    }
  }
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  run(op, stack, op);
}

// torch sends convolutions of devices that it doesn't know to operators of their own.
void convolution(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  static auto other = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  run(op, stack, other);
}

Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
             std::optional<Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  return make_empty(size, device ? device->index() : -1, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                     std::optional<c10::Layout>, std::optional<Device> device, std::optional<bool>) {
  return make_strided(size, stride, device ? device->index() : -1, c10::dtype_or_default(dtype));
}

Tensor view_of(const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride, int64_t offset) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(self.storage()), self.key_set(), self.dtype());
  at::native::setStrided(made, size, stride, offset);
  return made;
}

Tensor as_strided(const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) {
  return view_of(self, size, stride, offset.value_or(self.storage_offset()));
}

Tensor reshape_alias(const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return view_of(self, size, stride, self.storage_offset());
}

Tensor view(const Tensor& self, c10::IntArrayRef size) {
  auto inferred = at::infer_size_dv(size, self.numel());
  auto stride = at::detail::computeStride(self.sizes(), self.strides(), inferred);
  TORCH_CHECK(stride.has_value(), "view size is not compatible with input tensor's size and stride. Use .reshape(...).");
  return view_of(self, inferred, *stride, self.storage_offset());
}

Tensor view_through_cpu(const Tensor& self, const Tensor& cpu) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(self.storage()), self.key_set(), cpu.dtype());
  made.unsafeGetTensorImpl()->set_storage_offset(cpu.storage_offset());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(cpu.sizes(), cpu.strides());
  return made;
}

Tensor view_as_real(const Tensor& self) { return view_through_cpu(self, at::view_as_real(on_cpu(self))); }
Tensor view_as_complex(const Tensor& self) { return view_through_cpu(self, at::view_as_complex(on_cpu(self))); }
Tensor view_dtype(const Tensor& self, c10::ScalarType dtype) { return view_through_cpu(self, on_cpu(self).view(dtype)); }
Tensor unfold(const Tensor& self, int64_t dim, int64_t size, int64_t step) {
  return view_through_cpu(self, on_cpu(self).unfold(dim, size, step));
}

const Tensor& resize(const Tensor& self, c10::IntArrayRef size, std::optional<c10::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  if (self.sizes() != size) {
    impl->set_sizes_contiguous(size);
    size_t needed = at::detail::computeStorageNbytesContiguous(size, self.dtype().itemsize(), self.storage_offset());
    if (needed > impl->storage().nbytes()) {
      grow(impl->storage(), needed);
    }
  }
  if (format) {
    impl->empty_tensor_restride(*format);
  }
  return self;
}

Tensor& set_storage(Tensor& self, c10::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  std::vector<int64_t> contiguous(size.size(), 1);
  for (int64_t i = static_cast<int64_t>(size.size()) - 2; i >= 0; --i) {
    contiguous[i] = contiguous[i + 1] * std::max<int64_t>(size[i + 1], 1);
  }
  set_geometry(self, size, stride.size() == size.size() ? stride : c10::IntArrayRef(contiguous), offset);
  return self;
}

Tensor& set_whole_storage(Tensor& self, c10::Storage source) {
  auto size = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return set_storage(self, std::move(source), 0, {size}, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_nothing(Tensor& self) {
  c10::OptionalDeviceGuard guard(self.device());
  c10::Storage none(c10::Storage::use_byte_size_t(), 0, allocator().allocate(0), &allocator(), true);
  return set_storage(self, std::move(none), 0, {0}, {});
}

// ---- copies and reads ----

void host_waits(StreamKey stream) {
  Lock lock(state().mutex);
  merge(state().host, state().seen[stream]);
  state().host[stream] = state().issued[stream];
}

Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  bool from_device = is_fake(source);
  bool to_device = is_fake(target);
  auto stream = current_stream((to_device ? target : source).device().index());
  auto bytes = static_cast<int64_t>(target.nbytes());
  {
    Lock lock(state().mutex);
    auto number = issue(stream);
    if (from_device) {
      use(source, stream, number, false, "copy");
    }
    if (to_device) {
      use(target, stream, number, true, "copy");
    }
  }
  if (from_device && to_device) {
    note("device_copy", "copy", stream, bytes);
  } else if (to_device) {
    // A copy from pageable memory, like a blocking one, returns when the host memory has been read.
    bool waits = !non_blocking || !is_pinned(source.storage().data());
    note(waits ? "blocking_upload" : "upload", "copy", stream, bytes);
  } else {
    bool waits = !non_blocking || !is_pinned(target.storage().data());
    if (waits) {
      note_blocking("download", "copy", stream, bytes);
      host_waits(stream);
    } else {
      note("async_download", "copy", stream, bytes);
    }
  }
  on_cpu(target).copy_(on_cpu(source));
  return target;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

at::Scalar local_scalar(const Tensor& self) {
  auto stream = current_stream(self.device().index());
  {
    Lock lock(state().mutex);
    use(self, stream, issue(stream), false, "item");
  }
  note_blocking("read", "item", stream, static_cast<int64_t>(self.itemsize()));
  host_waits(stream);
  return on_cpu(self).item();
}

void record_stream(Tensor& self, Stream stream) {
  allocator().recordStream(self.storage().data_ptr(), stream);
  note("record_stream", "record_stream", {stream.device_index(), stream.id()});
}

std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  auto kept = at::empty_like(input, input.options().dtype(at::kBool));
  if (!train.value_or(true) || p == 0) {
    kept.fill_(true);
    return {input.clone(), kept};
  }
  kept.bernoulli_(1 - p);
  return {input * kept * (p == 1 ? 0.0 : 1.0 / (1.0 - p)), kept};
}

// The CPU kernel takes the gradients and outputs in another order of `output_mask`; convolution_backward is the same.
void convolution_backward(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  // convolution_backward has one more argument, bias_sizes, after the weight.
  static auto other = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
  Call call;
  call.name = op.schema().name();
  auto count = op.schema().arguments().size();
  std::vector<IValue> arguments(stack->end() - static_cast<int64_t>(count), stack->end());
  stack->resize(stack->size() - count);
  Tensor weight = arguments[2].toTensor();
  bool transposed = arguments[6].toBool();
  int64_t groups = arguments[8].toInt();
  std::vector<int64_t> bias{transposed ? weight.size(1) * groups : weight.size(0)};
  arguments.insert(arguments.begin() + 3, IValue(bias));
  torch::jit::Stack inner;
  for (auto& argument : arguments) {
    inner.push_back(call.enter(argument, false));
  }
  call.launch();
  other.callBoxed(&inner);
  for (auto& result : inner) {
    stack->push_back(call.leave(result));
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &as_strided);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("view", &view);
  m.impl("view.dtype", &view_dtype);
  m.impl("view_as_real", &view_as_real);
  m.impl("view_as_complex", &view_as_complex);
  m.impl("unfold", &unfold);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_nothing);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("record_stream", &record_stream);
  m.impl("native_dropout", &native_dropout);
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}

// ---- autocast ----

void cast_arguments(const c10::OperatorHandle& op, torch::jit::Stack* stack, bool lower) {
  c10::impl::ExcludeDispatchKeyGuard guard(c10::DispatchKey::AutocastPrivateUse1);
  auto count = op.schema().arguments().size();
  auto dtype = lower ? at::autocast::get_autocast_dtype(kDevice) : at::kFloat;
  for (auto i = stack->size() - count; i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isTensor() && value.toTensor().defined()) {
      value = at::autocast::cached_cast(dtype, value.toTensor(), kDevice);
    } else if (value.isTensorList()) {
      c10::List<Tensor> made;
      for (const Tensor& one : value.toTensorVector()) {
        made.push_back(at::autocast::cached_cast(dtype, one, kDevice));
      }
      value = made;
    }
  }
  op.callBoxed(stack);
}

void lower_precision(const c10::OperatorHandle& op, torch::jit::Stack* stack) { cast_arguments(op, stack, true); }
void full_precision(const c10::OperatorHandle& op, torch::jit::Stack* stack) { cast_arguments(op, stack, false); }

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

// The lists of CUDA, shortened to what models in tests use.
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  for (auto* name : {"_convolution", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d.input",
                     "convolution", "prelu", "addmm", "addmv", "addr", "matmul", "mm", "mv", "linear", "addbmm", "baddbmm",
                     "bmm", "scaled_dot_product_attention", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "lstm_cell",
                     "gru_cell"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&lower_precision>());
  }
  for (auto* name : {"softmax.int", "log_softmax.int", "layer_norm", "group_norm", "native_layer_norm", "exp", "expm1",
                     "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "mse_loss", "l1_loss",
                     "smooth_l1_loss", "huber_loss", "nll_loss", "nll_loss_nd", "kl_div", "cosine_similarity", "cosine_embedding_loss",
                     "binary_cross_entropy_with_logits", "norm.Scalar", "prod", "cumsum", "cumprod", "sum", "softplus", "dist",
                     "renorm", "erfinv", "acos", "asin", "cosh", "sinh", "tan", "cdist", "multilabel_margin_loss"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&full_precision>());
  }
}

// ---- streams, events, devices ----

struct FakeEvent {
  Clock clock;
  StreamKey stream;
  double time;
};

double now() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct FakeGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  Device exchangeDevice(Device device) const override {
    Device before(kDevice, current_device);
    setDevice(device);
    return before;
  }
  Device getDevice() const override { return {kDevice, current_device}; }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < state().devices, "There is no device fake:", int(device.index()), "; there are ",
                int(state().devices), " devices.");
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) {
      current_device = device.index();
    }
  }
  DeviceIndex deviceCount() const noexcept override { return state().devices; }
  Stream of(Device device, int64_t id) const {
    return Stream(Stream::UNSAFE, Device(kDevice, index_of(device)), id);
  }
  static DeviceIndex index_of(Device device) { return device.index() < 0 ? current_device : device.index(); }
  Stream getStream(Device device) const override { return of(device, current_streams[index_of(device)]); }
  Stream getDefaultStream(Device device) const override { return of(device, 0); }
  Stream getNewStream(Device device, int) const override {
    static std::atomic<int64_t> last{0};
    return of(device, ++last);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream exchangeStream(Stream stream) const override {
    auto before = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  static StreamKey key(const Stream& stream) { return {stream.device_index(), stream.id()}; }
  void record(void** event, const Stream& stream, DeviceIndex, c10::EventFlag) const override {
    Lock lock(state().mutex);
    if (*event == nullptr) {
      *event = new FakeEvent();
    }
    auto* made = static_cast<FakeEvent*>(*event);
    auto on = key(stream);
    made->clock = state().seen[on];
    made->clock[on] = state().issued[on];
    made->stream = on;
    made->time = now();
    note("record", "event", on);
  }
  void block(void* event, const Stream& stream) const override {
    Lock lock(state().mutex);
    if (event != nullptr) {
      auto* waited = static_cast<FakeEvent*>(event);
      merge(state().seen[key(stream)], waited->clock);
      note("wait", "for stream " + std::to_string(waited->stream.second), key(stream));
    }
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete static_cast<FakeEvent*>(event); }
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream& stream) const override {
    note_blocking("synchronize", "stream", key(stream));
    host_waits(key(stream));
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      auto* waited = static_cast<FakeEvent*>(event);
      note_blocking("synchronize", "event", waited->stream);
      Lock lock(state().mutex);
      merge(state().host, waited->clock);
    }
  }
  void synchronizeDevice(DeviceIndex device) const override {
    note_blocking("synchronize", "device", {device, 0});
    Lock lock(state().mutex);
    for (auto& [stream, number] : state().issued) {
      if (stream.first == device) {
        state().host[stream] = number;
      }
    }
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const Stream& stream) const override {
    allocator().recordStream(pointer, stream);
  }
  double elapsedTime(void* from, void* to, DeviceIndex) const override {
    return static_cast<FakeEvent*>(to)->time - static_cast<FakeEvent*>(from)->time;
  }
};

struct FakeHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return state().devices > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  void init() const override {}
  DeviceIndex deviceCount() const override { return state().devices; }
  void setCurrentDevice(DeviceIndex device) const override { FakeGuard().setDevice({kDevice, device}); }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return FakeGuard().exchangeDevice({kDevice, device}).index();
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  Device getDeviceFromPtr(void* pointer) const override {
    Lock lock(state().mutex);
    Block* block = block_of(pointer);
    return {kDevice, static_cast<DeviceIndex>(block != nullptr ? block->owner.first : current_device)};
  }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return at::make_generator<FakeGenerator>(device < 0 ? current_device : device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override { grow(storage, size); }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, FakeGuard);

// ---- collectives ----

// Finished work. Its tensors are on the device, so its future needs the device's type.
struct FakeWork final : c10d::Work {
  FakeWork(std::vector<Tensor> tensors, int device) : tensors(std::move(tensors)) {
    std::vector<Device> devices{Device(kDevice, static_cast<DeviceIndex>(device))};
    future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
    future->markCompleted(IValue(this->tensors));
  }
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override { return true; }
  void synchronize() override {}
  std::vector<Tensor> result() override { return tensors; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }
  std::vector<Tensor> tensors;
  c10::intrusive_ptr<c10::ivalue::Future> future;
};

using Tensors = std::vector<Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// Sends the device's tensors with gloo, through their CPU aliases. Collectives are complete when they
// return; point-to-point calls aren't, because two ranks may call them in different orders.
struct FakeCollectives final : c10d::Backend {
  FakeCollectives(int rank, int size, c10::intrusive_ptr<c10d::Backend> gloo) : Backend(rank, size), gloo(std::move(gloo)) {}
  const std::string getBackendName() const override { return "fakeccl"; }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo->setTimeout(timeout); }
  void setSequenceNumberForGroup() override { gloo->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo->getSequenceNumberForGroup(); }
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override {}
  WorkPtr endCoalescing() override { return c10::make_intrusive<FakeWork>(Tensors{}, current_device); }

  static Tensors aliases(const Tensors& tensors) {
    Tensors made;
    for (auto& tensor : tensors) {
      made.push_back(on_cpu(tensor));
    }
    return made;
  }
  static std::vector<Tensors> aliases(const std::vector<Tensors>& lists) {
    std::vector<Tensors> made;
    for (auto& tensors : lists) {
      made.push_back(aliases(tensors));
    }
    return made;
  }
  static Tensors flat(const std::vector<Tensors>& lists) {
    Tensors made;
    for (auto& tensors : lists) {
      made.insert(made.end(), tensors.begin(), tensors.end());
    }
    return made;
  }
  static int launch(const char* name, const Tensors& read, const Tensors& written) {
    Lock lock(state().mutex);
    int device = current_device;
    int64_t bytes = 0;
    for (auto* tensors : {&read, &written}) {
      for (auto& tensor : *tensors) {
        TORCH_CHECK(is_fake(tensor), "fakeccl sends tensors on the device fake, not on ", tensor.device());
        device = tensor.device().index();
        bytes += tensors == &read ? static_cast<int64_t>(tensor.nbytes()) : 0;
      }
    }
    auto stream = current_stream(device);
    auto number = issue(stream);
    note("collective", name, stream, bytes);
    for (auto& tensor : read) {
      use(tensor, stream, number, false, name);
    }
    for (auto& tensor : written) {
      use(tensor, stream, number, true, name);
    }
    return device;
  }
  // gloo has no average.
  template <typename Options>
  static std::pair<Options, bool> without_average(Options options) {
    bool average = options.reduceOp == c10d::ReduceOp::AVG;
    if (average) {
      options.reduceOp = c10d::ReduceOp::SUM;
    }
    return {options, average};
  }
  WorkPtr done(const WorkPtr& work, const Tensors& results, int device, bool average = false) {
    work->wait();
    for (auto& result : results) {
      if (average) {
        on_cpu(result).div_(getSize());
      }
    }
    return c10::make_intrusive<FakeWork>(results, device);
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    int device = launch("broadcast", tensors, tensors);
    auto cpu = aliases(tensors);
    return done(gloo->broadcast(cpu, options), tensors, device);
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    int device = launch("allreduce", tensors, tensors);
    auto cpu = aliases(tensors);
    auto [changed, average] = without_average(options);
    return done(gloo->allreduce(cpu, changed), tensors, device, average);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    for (auto& tensor : tensors) {
      Tensors one{tensor};
      allreduce(one, options);
    }
    return c10::make_intrusive<FakeWork>(tensors, current_device);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    int device = launch("reduce", tensors, tensors);
    auto cpu = aliases(tensors);
    auto [changed, average] = without_average(options);
    return done(gloo->reduce(cpu, changed), tensors, device, average && getRank() == options.rootRank);
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    int device = launch("allgather", inputs, flat(outputs));
    auto to = aliases(outputs);
    auto from = aliases(inputs);
    return done(gloo->allgather(to, from, options), flat(outputs), device);
  }
  WorkPtr _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    int device = launch("allgather", {input}, {output});
    auto to = on_cpu(output);
    // The input is often a part of the output, which gloo copies into itself.
    auto from = input.is_alias_of(output) ? on_cpu(input).clone() : on_cpu(input);
    return done(gloo->_allgather_base(to, from, options), {output}, device);
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    for (size_t i = 0; i < outputs.size(); ++i) {
      _allgather_base(outputs[i], inputs[i], options);
    }
    return c10::make_intrusive<FakeWork>(outputs, current_device);
  }
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    int device = launch("gather", inputs, flat(outputs));
    auto to = aliases(outputs);
    auto from = aliases(inputs);
    return done(gloo->gather(to, from, options), flat(outputs), device);
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    int device = launch("scatter", flat(inputs), outputs);
    auto to = aliases(outputs);
    auto from = aliases(inputs);
    return done(gloo->scatter(to, from, options), outputs, device);
  }
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
    int device = launch("reduce_scatter", flat(inputs), outputs);
    auto to = aliases(outputs);
    auto from = aliases(inputs);
    auto [changed, average] = without_average(options);
    return done(gloo->reduce_scatter(to, from, changed), outputs, device, average);
  }
  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    int device = launch("reduce_scatter", {input}, {output});
    auto to = on_cpu(output);
    auto from = on_cpu(input);
    auto [changed, average] = without_average(options);
    return done(gloo->_reduce_scatter_base(to, from, changed), {output}, device, average);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    for (size_t i = 0; i < outputs.size(); ++i) {
      _reduce_scatter_base(outputs[i], inputs[i], options);
    }
    return c10::make_intrusive<FakeWork>(outputs, current_device);
  }
  WorkPtr alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& to_sizes, std::vector<int64_t>& from_sizes,
                        const c10d::AllToAllOptions& options) override {
    int device = launch("alltoall", {input}, {output});
    auto to = on_cpu(output);
    auto from = on_cpu(input);
    return done(gloo->alltoall_base(to, from, to_sizes, from_sizes, options), {output}, device);
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    int device = launch("alltoall", inputs, outputs);
    std::vector<WorkPtr> works; // gloo has alltoall_base only
    for (int other = 0; other < getSize(); ++other) {
      Tensors to{on_cpu(outputs[other])};
      Tensors from{on_cpu(inputs[other])};
      if (other == getRank()) {
        to[0].copy_(from[0]);
        continue;
      }
      works.push_back(gloo->recv(to, other, 77));
      works.push_back(gloo->send(from, other, 77));
    }
    for (auto& work : works) {
      work->wait();
    }
    return c10::make_intrusive<FakeWork>(outputs, device);
  }
  WorkPtr send(Tensors& tensors, int to, int tag) override {
    launch("send", tensors, {});
    auto cpu = aliases(tensors);
    return gloo->send(cpu, to, tag);
  }
  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    launch("recv", {}, tensors);
    auto cpu = aliases(tensors);
    return gloo->recv(cpu, from, tag);
  }
  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    launch("recv", {}, tensors);
    auto cpu = aliases(tensors);
    return gloo->recvAnysource(cpu, tag);
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    c10d::BarrierOptions changed(options);
    changed.device_ids.clear();
    changed.device = std::nullopt;
    gloo->barrier(changed)->wait();
    return c10::make_intrusive<FakeWork>(Tensors{}, current_device);
  }
  c10::intrusive_ptr<c10d::Backend> gloo;
};

// ---- Python ----

// Many operators have a kernel that allocates the result and calls the `out` variant. Call the operator
// itself on the CPU instead, so that the log names what the script called.
void take_structured_operators() {
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  auto key = c10::DispatchKey::CompositeExplicitAutogradNonFunctional;
  for (auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!op || name.name.rfind("aten::", 0) != 0 || !op->hasKernelForDispatchKey(key) ||
        op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) {
      continue;
    }
    bool view = false;
    for (auto& result : op->schema().returns()) {
      view |= result.alias_info() != nullptr && !result.alias_info()->isWrite();
    }
    if (!view) {
      auto full = name.name + (name.overload_name.empty() ? "" : "." + name.overload_name);
      library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
    }
  }
}

void start(int devices, std::vector<int64_t> limits, py::object stack) {
  auto& state_ = state();
  TORCH_CHECK(state_.memory.empty(), "The fake device was started already.");
  state_.devices = static_cast<DeviceIndex>(devices);
  state_.memory.resize(devices);
  state_.stack = std::move(stack);
  for (int i = 0; i < devices; ++i) {
    state_.memory[i].limit = static_cast<size_t>(limits.at(i));
    state_.generators.push_back(at::make_generator<FakeGenerator>(static_cast<DeviceIndex>(i)));
  }
  c10::SetAllocator(kDevice, &allocator());
  at::setHostAllocator(kDevice, &pinned_allocator());
  at::RegisterPrivateUse1HooksInterface(new FakeHooks());
  take_structured_operators();
}

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("start", &start);
  m.def("device_count", [] { return int(state().devices); });
  m.def("default_generator", [](int device) { return default_generator(static_cast<DeviceIndex>(device)); });
  m.def("set_memory_limit", [](int device, int64_t limit) { state().memory.at(device).limit = static_cast<size_t>(limit); });
  m.def("counts", [] {
    Lock lock(state().mutex);
    return state().counts;
  });
  m.def("record", [](bool on) {
    Lock lock(state().mutex);
    state().recording = on;
    std::vector<std::tuple<std::string, std::string, int, int64_t, int64_t, std::string>> made;
    for (auto& entry : state().log) {
      made.emplace_back(entry.kind, entry.name, entry.device, entry.stream, entry.bytes, entry.where);
    }
    state().log.clear();
    return made;
  });
  py::class_<FakeCollectives, c10d::Backend, c10::intrusive_ptr<FakeCollectives>>(m, "Collectives")
      .def(py::init<int, int, c10::intrusive_ptr<c10d::Backend>>());
}
