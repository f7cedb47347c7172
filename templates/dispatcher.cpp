// The way of an eager call from torch's dispatcher to its launches, without Python.
//
// gemmgen/dispatcher.py builds this file once per version of torch, and mirrors the structs below in ctypes.
// A call is recognised by the metadata of its arguments. One that was not seen before runs in Python, through the
// op's `python` overload, which offers the plan that it made; calls alike are then launched from here. Where all M of
// a class run the same kernel, they are alike.

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_addmm_activation.h>
#include <ATen/ops/_int_mm.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <c10/core/GradMode.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <unordered_map>
#include <vector>

namespace {

constexpr int kAbiVersion = 4;
constexpr int kMaxArgsBytes = 2048;
constexpr int kMaxKeyWords = 320;
constexpr int kMaxResults = 8;
constexpr int kMaxDims = 3;
constexpr int kMaxLoads = 16;
constexpr size_t kMaxPlans = 4096;  // of one op; then all are forgotten

// --- what Python fills in

using Run = int (*)(void* kernel, const void* args, void* workspace, void* stream);
using WorkspaceOf = int64_t (*)(const void* args);
using ContextGetCurrent = int (*)(void** context);
using LaunchKernel = int (*)(void* function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned smem,
                             void* stream, void** parameters, void** extra);
using CurrentStream = int (*)(int32_t device_index, void** stream);

struct Driver {
  ContextGetCurrent context_get_current;
  LaunchKernel launch_kernel;
  CurrentStream current_stream;
};

// Up to this M, and beyond that of the one before, the multiples of `step` are the largest M of their classes.
struct MClasses {
  int64_t up_to, step;
};

// An op of torch that computes a whole call, in the place of a kernel of ours.
enum class TorchOp : int32_t { kNone, kMm, kAddmm, kAddmmRelu, kAddmmGeluTanh };

// The op of torch that makes what the pointwise kernel reads.
enum class Product : int32_t { kNone, kMmDtype, kIntMm };

struct Result {
  int64_t sizes[kMaxDims];
  int32_t dims;
  int32_t scalar_type;
  int32_t word;    // of its pointer in the kernel's arguments, or of the pointer to its partials
  int32_t m_axis;  // the axis that is M; -1 where M is the plan's
};

struct Load {
  int32_t argument;      // of the op: a tensor
  int32_t word;          // of its pointer
  int32_t value_offset;  // where the number beside a None goes, a float, in bytes
  int32_t is_number;
};

// One step that makes a result [L, X] of partials [L, P, X]; see gemmgen_finish in finish.cu.jinja.
struct Step {
  void* function;
  int64_t batches, count, kept;
  uint32_t grid[3];
  int32_t is_narrow;
};

struct Finish {
  int32_t result;
  int32_t step_count;  // 2 for a result over both axes
  Step steps[2];
};

struct Plan {
  void* context;  // the CUDA context that the kernel was loaded into
  Run run;        // of a fused kernel; null where there is a `pointwise`
  void* kernel;
  const void* args;  // of the kernel, without pointers
  WorkspaceOf workspace_of;
  int32_t args_bytes;
  int32_t m_offset;  // of M in `args`, in bytes
  int32_t a_word, b_word;
  int32_t result_count, load_count, finish_count;
  uint32_t finish_threads;
  void* pointwise;  // gemmgen_pointwise, over what `product` makes
  uint32_t pointwise_threads, pointwise_ctas;  // the same for all M of a class
  Product product;
  TorchOp torch_op;
  int32_t torch_bias;  // argument of the op: the bias of `torch_op`
  Result results[kMaxResults];
  Load loads[kMaxLoads];
  Finish finishes[kMaxResults];
};

Driver driver{};
std::vector<MClasses> m_classes;

// --- telling calls apart

// The largest M of the class of `m`.
int64_t representative_of(int64_t m) {
  const auto found = std::find_if(m_classes.begin(), m_classes.end(), [m](MClasses some) { return m <= some.up_to; });
  return found == m_classes.end() ? m : (m + found->step - 1) / found->step * found->step;
}

struct Key {
  std::array<int64_t, kMaxKeyWords> words;
  int count = 0;

  bool add(int64_t word) {
    if (count == kMaxKeyWords) return false;
    words[count++] = word;
    return true;
  }

  // `rows`: what to read in the place of the first extent, or 0 for that itself.
  bool add(const at::Tensor& x, int64_t rows) {
    const int64_t dims = x.dim();
    if (count + 1 + 2 * dims > kMaxKeyWords) return false;
    const auto alignment = reinterpret_cast<uintptr_t>(x.const_data_ptr()) & 15;
    words[count++] = static_cast<int64_t>(x.scalar_type()) | static_cast<int64_t>(x.get_device() & 0xff) << 8 |
                     static_cast<int64_t>(alignment) << 16 | dims << 32 | int64_t{1} << 56;
    const int first = count;
    for (const int64_t size : x.sizes()) words[count++] = size;
    if (rows != 0) words[first] = rows;
    for (const int64_t stride : x.strides()) words[count++] = stride;
    return true;
  }

  uint64_t hash() const {
    uint64_t value = 0x9e3779b97f4a7c15u;
    for (int i = 0; i < count; ++i) {
      value = (value ^ static_cast<uint64_t>(words[i])) * 0xff51afd7ed558ccdu;
      value ^= value >> 32;
    }
    return value;
  }

  bool equals(const std::vector<int64_t>& other) const {
    return other.size() == static_cast<size_t>(count) && std::equal(other.begin(), other.end(), words.begin());
  }
};

// The M that a call may share with its class; 0 where that is part of what the call is: in a batch, whose results lie M
// rows apart, and where M is the contiguous axis of A, whose alignment it decides.
int64_t shared_m(c10::ArrayRef<c10::IValue> arguments) {
  const at::Tensor &A = arguments[0].toTensor(), &B = arguments[1].toTensor();
  const bool is_plain = A.defined() && B.defined() && A.layout() == c10::kStrided && A.dim() == 2 && B.dim() == 2;
  return is_plain && A.stride(1) == 1 && A.size(0) <= std::numeric_limits<int32_t>::max() ? A.size(0) : 0;
}

// Whether all arguments could be read. Numbers are values of a call, not part of what it is; nor is M, beyond its
// class, where `is_along_m` says which arguments begin with it. A is the first of them.
bool read_key(c10::ArrayRef<c10::IValue> arguments, const std::vector<char>& is_along_m, Key& key) {
  const int64_t m = is_along_m[0] ? shared_m(arguments) : 0;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const c10::IValue& argument = arguments[i];
    if (argument.isTensor()) {
      const at::Tensor& x = argument.toTensor();
      if (!x.defined() || x.layout() != c10::kStrided) return false;
      const bool is_m = m != 0 && is_along_m[i];
      if (is_m && (x.dim() == 0 || x.size(0) != m)) return false;  // Python says what is wrong with it
      if (!key.add(x, is_m ? representative_of(m) : 0)) return false;
    } else if (argument.isInt()) {
      if (!key.add(argument.toInt()) || !key.add(2)) return false;
    } else if (argument.isNone() || argument.isDouble()) {
      if (!key.add(argument.isNone() ? 3 : 4)) return false;
    } else {
      return false;
    }
  }
  return true;
}

// --- running a plan

struct Owned {
  explicit Owned(const Plan& given)
      : plan(given), args(bytes_of(given), bytes_of(given) + given.args_bytes) {}
  static const char* bytes_of(const Plan& plan) { return static_cast<const char*>(plan.args); }
  Plan plan;
  std::vector<char> args;
};

void launch_step(const Plan& plan, const Step& step, void* partials, void* result, void* stream, int& status) {
  if (status != 0) return;
  int64_t count = step.count, kept = step.kept, batches = step.batches, of_batch = step.kept * step.count;
  int32_t is_narrow = step.is_narrow;
  void* parameters[] = {&partials, &result, &count, &kept, &batches, &kept, &of_batch, &is_narrow};
  status = driver.launch_kernel(step.function, step.grid[0], step.grid[1], step.grid[2], plan.finish_threads, 1, 1, 0,
                                stream, parameters, nullptr);
}

int finish(const Plan& plan, const Finish& last, const at::Tensor& partials, const at::Tensor& result, void* stream) {
  int status = 0;
  if (last.step_count == 1) {
    launch_step(plan, last.steps[0], partials.data_ptr(), result.data_ptr(), stream, status);
    return status;
  }
  const at::Tensor columns = at::empty({last.steps[0].batches, last.steps[0].kept}, partials.options());
  launch_step(plan, last.steps[0], partials.data_ptr(), columns.data_ptr(), stream, status);
  launch_step(plan, last.steps[1], columns.data_ptr(), result.data_ptr(), stream, status);
  return status;
}

at::Tensor product_of(const Plan& plan, const at::Tensor& A, const at::Tensor& B) {
  return plan.product == Product::kIntMm ? at::_int_mm(A, B) : at::mm(A, B, at::kFloat);
}

int run_pointwise(const Plan& plan, void* args, void* stream) {
  void* parameters[] = {args};
  return driver.launch_kernel(plan.pointwise, plan.pointwise_ctas, 1, 1, plan.pointwise_threads, 1, 1, 0, stream,
                              parameters, nullptr);
}

int run_fused(const Plan& plan, void* args, const at::TensorOptions& options, void* stream) {
  const int64_t bytes = plan.workspace_of(args);
  const at::Tensor workspace = bytes > 0 ? at::empty({bytes}, options.dtype(at::kByte)) : at::Tensor();
  return plan.run(plan.kernel, args, workspace.defined() ? workspace.data_ptr() : nullptr, stream);
}

at::Tensor torch_result(const Plan& plan, c10::ArrayRef<c10::IValue> arguments) {
  const at::Tensor &A = arguments[0].toTensor(), &B = arguments[1].toTensor();
  if (plan.torch_op == TorchOp::kMm) return at::mm(A, B);
  const at::Tensor& bias = arguments[plan.torch_bias].toTensor();
  if (plan.torch_op == TorchOp::kAddmmGeluTanh) return at::_addmm_activation(bias, A, B, 1, 1, /*use_gelu=*/true);
  const at::Tensor sum = at::addmm(bias, A, B);
  return plan.torch_op == TorchOp::kAddmmRelu ? sum.relu_() : sum;
}

// The results of a call, or nothing where Python has to look: another context is current, or a launch was refused.
std::optional<std::vector<at::Tensor>> run(const Owned& owned, c10::ArrayRef<c10::IValue> arguments) {
  const Plan& plan = owned.plan;
  void* context = nullptr;
  if (driver.context_get_current(&context) != 0 || context != plan.context) return std::nullopt;
  if (plan.torch_op != TorchOp::kNone) return std::vector<at::Tensor>{torch_result(plan, arguments)};
  const at::Tensor &A = arguments[0].toTensor(), &B = arguments[1].toTensor();
  void* stream = nullptr;
  if (driver.current_stream(A.get_device(), &stream) != 0) return std::nullopt;

  alignas(16) char args[kMaxArgsBytes];
  std::memcpy(args, owned.args.data(), owned.args.size());
  void** words = reinterpret_cast<void**>(args);
  const at::Tensor accum = plan.product == Product::kNone ? at::Tensor() : product_of(plan, A, B);
  words[plan.a_word] = const_cast<void*>((accum.defined() ? accum : A).const_data_ptr());
  words[plan.b_word] = const_cast<void*>(B.const_data_ptr());
  const int64_t m = A.size(-2);
  const auto m_of_args = static_cast<int32_t>(m);
  std::memcpy(args + plan.m_offset, &m_of_args, sizeof m_of_args);
  for (int i = 0; i < plan.load_count; ++i) {
    const Load& load = plan.loads[i];
    if (load.is_number) {
      const float value = static_cast<float>(arguments[load.argument + 1].toDouble());
      std::memcpy(args + load.value_offset, &value, sizeof value);
    } else {
      words[load.word] = const_cast<void*>(arguments[load.argument].toTensor().const_data_ptr());
    }
  }
  const auto options = at::TensorOptions().device(A.device());
  std::vector<at::Tensor> results;
  results.reserve(plan.result_count);
  for (int i = 0; i < plan.result_count; ++i) {
    const Result& result = plan.results[i];
    std::array<int64_t, kMaxDims> sizes;
    std::copy_n(result.sizes, kMaxDims, sizes.begin());
    if (result.m_axis >= 0) sizes[result.m_axis] = m;
    const auto dtype = static_cast<c10::ScalarType>(result.scalar_type);
    results.push_back(at::empty(c10::IntArrayRef(sizes.data(), result.dims), options.dtype(dtype)));
    words[result.word] = results.back().data_ptr();
  }
  std::array<at::Tensor, kMaxResults> partials;
  for (int i = 0; i < plan.finish_count; ++i) {
    const Step& step = plan.finishes[i].steps[0];
    partials[i] = at::empty({step.batches, step.count, step.kept}, options.dtype(at::kFloat));
    words[plan.results[plan.finishes[i].result].word] = partials[i].data_ptr();
  }
  const int status = accum.defined() ? run_pointwise(plan, args, stream) : run_fused(plan, args, options, stream);
  if (status != 0) return std::nullopt;
  for (int i = 0; i < plan.finish_count; ++i) {
    const Finish& last = plan.finishes[i];
    if (finish(plan, last, partials[i], results[last.result], stream) != 0) return std::nullopt;
  }
  return results;
}

// --- the op's kernels

struct Op {
  Op(c10::OperatorHandle given, std::vector<char> along_m)
      : python(std::move(given)), argument_count(along_m.size()), is_along_m(std::move(along_m)) {}

  std::shared_ptr<const Owned> find(const Key& key, uint64_t hash) {
    std::shared_lock lock(mutex);
    const auto found = plans.find(hash);
    return found != plans.end() && key.equals(found->second.first) ? found->second.second : nullptr;
  }

  // Unless plans were forgotten since `made_in`.
  void put(const Key& key, uint64_t hash, std::shared_ptr<const Owned> plan, uint64_t made_in) {
    std::unique_lock lock(mutex);
    if (made_in != generation.load()) return;
    if (plans.size() >= kMaxPlans) plans.clear();
    std::vector<int64_t> words(key.words.begin(), key.words.begin() + key.count);
    plans.insert_or_assign(hash, std::pair(std::move(words), std::move(plan)));
  }

  const c10::OperatorHandle python;
  const size_t argument_count;
  const std::vector<char> is_along_m;  // by argument
  std::shared_mutex mutex;
  std::unordered_map<uint64_t, std::pair<std::vector<int64_t>, std::shared_ptr<const Owned>>> plans;
  std::atomic<uint64_t> generation{0};  // counts `forget`: a plan made before it must not come in after it
  std::atomic<int64_t> launches{0};
};

thread_local Op* offering = nullptr;
thread_local std::shared_ptr<const Owned> offered;

// Runs a call: for the key of the device.
struct Call final : c10::OperatorKernel {
  explicit Call(Op* op) : op_(op) {}

  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    Key key;
    const auto arguments = torch::jit::last(*stack, op_->argument_count);
    const bool is_readable = read_key(arguments, op_->is_along_m, key);
    const uint64_t hash = is_readable ? key.hash() : 0;
    if (is_readable) {
      if (const auto plan = op_->find(key, hash)) {
        if (auto results = run(*plan, arguments)) {
          op_->launches.fetch_add(1, std::memory_order_relaxed);
          torch::jit::drop(*stack, op_->argument_count);
          for (at::Tensor& result : *results) stack->emplace_back(std::move(result));
          return;
        }
      }
    }
    const uint64_t generation = op_->generation.load();
    offering = nullptr;
    op_->python.redispatchBoxed(keys, stack);
    if (is_readable && offering == op_) op_->put(key, hash, std::move(offered), generation);
    offering = nullptr;
    offered.reset();
  }

 private:
  Op* op_;
};

// Lets a call that records no gradient pass, and hands others to Python: for the key Autograd.
struct Record final : c10::OperatorKernel {
  explicit Record(Op* op) : op_(op) {}

  void operator()(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    const bool is_recording = c10::GradMode::is_enabled();
    for (const c10::IValue& argument : torch::jit::last(*stack, op_->argument_count)) {
      if (!argument.isTensor()) continue;
      const at::Tensor& x = argument.toTensor();
      if (x.defined() && ((is_recording && x.requires_grad()) || x._fw_grad(0).defined())) {
        op_->python.redispatchBoxed(keys, stack);
        return;
      }
    }
    at::AutoDispatchBelowAutograd guard;
    handle.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
  }

 private:
  Op* op_;
};

}  // namespace

#define EXPORTED __attribute__((visibility("default")))

extern "C" {

EXPORTED int gemmgen_dispatcher_abi() { return kAbiVersion; }

EXPORTED int64_t gemmgen_dispatcher_plan_bytes() { return sizeof(Plan); }

EXPORTED void gemmgen_dispatcher_bind(const Driver* given) { driver = *given; }

// Once, before the first op: calls read the classes unguarded.
EXPORTED void gemmgen_dispatcher_classify(const MClasses* given, int count) {
  if (m_classes.empty()) m_classes.assign(given, given + count);
}

EXPORTED int64_t gemmgen_dispatcher_representative(int64_t m) { return representative_of(m); }

// Implements `gemmgen::<name>` for the device key and for Autograd, with Python behind `gemmgen::<name>.python`.
// `along_m`: the arguments that begin with M, where all M of a class have one plan; none where each has its own.
EXPORTED void* gemmgen_dispatcher_implement(const char* name, const char* device_key, const int32_t* along_m,
                                            int count) {
  static auto* library = new torch::Library(torch::Library::IMPL, "gemmgen", std::nullopt, __FILE__, __LINE__);
  const std::string qualified = std::string("gemmgen::") + name;
  const auto python = c10::Dispatcher::singleton().findSchema({qualified, "python"});
  if (!python) return nullptr;
  std::vector<char> is_along_m(python->schema().arguments().size());
  std::for_each_n(along_m, count, [&](int32_t argument) { is_along_m[argument] = true; });
  auto* op = new Op(*python, std::move(is_along_m));  // as long-lived as the registration
  const auto key = c10::parseDispatchKey(device_key);
  library->impl(name, torch::dispatch(key, torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Call>(op))));
  library->impl(name, torch::dispatch(c10::DispatchKey::Autograd,
                                      torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Record>(op))));
  return op;
}

// Offers the plan of the call of `op` that this thread is running in Python.
EXPORTED void gemmgen_dispatcher_offer(void* op, const Plan* plan) {
  offering = static_cast<Op*>(op);
  offered = std::make_shared<const Owned>(*plan);
}

EXPORTED void gemmgen_dispatcher_forget(void* op) {
  auto* known = static_cast<Op*>(op);
  std::unique_lock lock(known->mutex);
  known->generation.fetch_add(1);
  known->plans.clear();
}

// How many calls of `op` were launched from here.
EXPORTED int64_t gemmgen_dispatcher_launches(void* op) { return static_cast<Op*>(op)->launches.load(); }

}  // extern "C"
