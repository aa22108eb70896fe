// SPDX-License-Identifier: Apache-2.0

#include "snapshot/torch_snapshotter.h"

#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
#include <torch/version.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <exception>
#include <map>
#include <set>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "core/base/digest.h"
#include "core/base/names.h"
#include "core/base/strings.h"
#include "snapshot/device/cuda_copier.h"
#include "snapshot/wire/protocol.h"

namespace ckptfs {
namespace {

using torch::Tensor;

// Below this many bytes a tensor is copied at once: looking at it again costs more.
constexpr size_t kSmall = 64 << 10;

struct Unholdable {
  std::string what;
};

DType DTypeOf(const Tensor& tensor, const std::string& name) {
  const std::string word(c10::toString(tensor.scalar_type()));
  static const std::map<std::string_view, DType> known = {
      {"Float", DType::kF32},     {"Double", DType::kF64}, {"Half", DType::kF16},
      {"BFloat16", DType::kBF16}, {"Long", DType::kI64},   {"Int", DType::kI32},
      {"Short", DType::kI16},     {"Char", DType::kI8},    {"Byte", DType::kU8},
      {"Bool", DType::kBool}};
  const auto found = known.find(word);
  if (found == known.end()) throw Unholdable{StrCat(name, " has type ", word)};
  return found->second;
}

// A dict of numbers, as Python's pickle of protocol 2 writes it.
class NumbersPickle {
 public:
  void Add(std::string_view key, double value) {
    Key(key);
    Float(value);
  }
  void Add(std::string_view key, bool value) {
    Key(key);
    text_ += value ? '\x88' : '\x89';
  }
  void Add(std::string_view key, const std::tuple<double, double>& pair) {
    Key(key);
    Float(std::get<0>(pair));
    Float(std::get<1>(pair));
    text_ += '\x86';
  }
  std::string Finish() && { return std::move(text_) + "u."; }

 private:
  void Key(std::string_view key) {
    text_ += 'X';
    for (int shift = 0; shift < 32; shift += 8) text_ += static_cast<char>(key.size() >> shift);
    text_ += key;
  }
  void Float(double value) {
    text_ += 'G';
    for (int shift = 56; shift >= 0; shift -= 8) {
      text_ += static_cast<char>(std::bit_cast<uint64_t>(value) >> shift);
    }
  }
  std::string text_ = "\x80\x02}(";
};

// The state that a kind of optimizer keeps, under the names that it has in Python.
struct KindOfOptimizer {
  std::string (*hyper_parameters)(const torch::optim::OptimizerOptions&);
  void (*visit)(const torch::optim::OptimizerParamState&,
                const std::function<void(const char*, const Tensor&)>&,
                const std::function<void(const char*, int64_t)>&);
};

template <class Options>
std::string HyperParameters(const torch::optim::OptimizerOptions& given) {
  const auto& options = static_cast<const Options&>(given);
  NumbersPickle numbers;
#define CKPT_ADD(name) \
  if constexpr (requires { options.name(); }) numbers.Add(#name, options.name())
  CKPT_ADD(lr);
  CKPT_ADD(betas);
  CKPT_ADD(eps);
  CKPT_ADD(weight_decay);
  CKPT_ADD(amsgrad);
  CKPT_ADD(momentum);
  CKPT_ADD(dampening);
  CKPT_ADD(nesterov);
  CKPT_ADD(alpha);
  CKPT_ADD(centered);
  CKPT_ADD(lr_decay);
  CKPT_ADD(initial_accumulator_value);
#undef CKPT_ADD
  return std::move(numbers).Finish();
}

template <class State>
void Visit(const torch::optim::OptimizerParamState& given,
           const std::function<void(const char*, const Tensor&)>& tensor,
           const std::function<void(const char*, int64_t)>& number) {
  const auto& state = static_cast<const State&>(given);
#define CKPT_TENSOR(name) \
  if constexpr (requires { state.name(); }) tensor(#name, state.name())
  if constexpr (requires { state.step(); }) number("step", state.step());
  CKPT_TENSOR(exp_avg);
  CKPT_TENSOR(exp_avg_sq);
  CKPT_TENSOR(max_exp_avg_sq);
  CKPT_TENSOR(momentum_buffer);
  CKPT_TENSOR(square_avg);
  CKPT_TENSOR(grad_avg);
  CKPT_TENSOR(sum);
#undef CKPT_TENSOR
}

template <class Optimizer, class Options, class State>
std::optional<KindOfOptimizer> If(const torch::optim::Optimizer& optimizer) {
  if (dynamic_cast<const Optimizer*>(&optimizer) == nullptr) return std::nullopt;
  return KindOfOptimizer{&HyperParameters<Options>, &Visit<State>};
}

std::optional<KindOfOptimizer> KindOf(const torch::optim::Optimizer& given) {
  namespace optim = torch::optim;
  for (const auto& kind :
       {If<optim::AdamW, optim::AdamWOptions, optim::AdamWParamState>(given),
        If<optim::Adam, optim::AdamOptions, optim::AdamParamState>(given),
        If<optim::SGD, optim::SGDOptions, optim::SGDParamState>(given),
        If<optim::RMSprop, optim::RMSpropOptions, optim::RMSpropParamState>(given),
        If<optim::Adagrad, optim::AdagradOptions, optim::AdagradParamState>(given)}) {
    if (kind) return kind;
  }
  return std::nullopt;
}

// A tensor that all ranks hold alike.
struct Shared {
  uint64_t bytes = 0;
  CapturedTensor tensor;
};

struct Watched {
  std::string name;
  Tensor tensor;
  int64_t version = 0;
  const void* address = nullptr;
};

// One save: what is captured, and what keeps its memory.
class Shot {
 public:
  Shot(uint64_t step, uint32_t rank, uint32_t world) : rank_(rank), world_(world) {
    capture_.step = step;
    capture_.framework_version = TORCH_VERSION;
  }

  void AddModule(const torch::nn::Module& module) {
    for (const auto& item : module.named_parameters()) {
      AddNamed(item.key(), item.value(), item.value().requires_grad() ? "trainable" : "frozen");
    }
    for (const auto& item : module.named_buffers()) AddNamed(item.key(), item.value(), "buffer");
  }

  void AddOptimizer(const torch::optim::Optimizer& optimizer, const KindOfOptimizer& kind) {
    for (const torch::optim::OptimizerParamGroup& group : optimizer.param_groups()) {
      CapturedGroup captured{"", {}, StrCat("ckptfs.group/", capture_.groups.size())};
      for (const Tensor& parameter : group.params()) {
        captured.parameters.push_back(NameOf(parameter.unsafeGetTensorImpl()));
      }
      AddPickle(captured.pickle, kind.hyper_parameters(group.options()));
      capture_.groups.push_back(std::move(captured));
    }
    for (const auto& [key, state] : optimizer.state()) {
      const std::string name = NameOf(key);
      kind.visit(
          *state,
          [&](const char* what, const Tensor& tensor) {
            if (tensor.defined()) AddState(name, what, tensor, true, false);
          },
          [&](const char* what, int64_t number) {
            AddState(name, what, torch::tensor(number, torch::kInt64), false, true);
          });
    }
  }

  Capture Finish() && {
    Share();
    std::shared_ptr<const std::vector<Watched>> watched =
        std::make_shared<const std::vector<Watched>>(std::move(watched_));
    capture_.owner = std::make_shared<const std::vector<Tensor>>(std::move(kept_));
    capture_.changed = [watched](bool) -> std::string {
      for (const Watched& one : *watched) {
        if (one.tensor._version() != one.version || one.tensor.const_data_ptr() != one.address) {
          return one.name;
        }
      }
      return "";
    };
    for (const int device : devices_) {
      const c10::impl::VirtualGuardImpl guard(c10::DeviceType::CUDA);
      const c10::Stream stream = guard.getStream(
          c10::Device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(device)));
      capture_.streams.push_back({device, reinterpret_cast<uint64_t>(stream.native_handle())});
    }
    return std::move(capture_);
  }

 private:
  void AddNamed(const std::string& name, const Tensor& tensor, const char* role) {
    const auto [first, is_new] = names_.try_emplace(tensor.unsafeGetTensorImpl(), name);
    if (!is_new) {
      if (rank_ == 0) capture_.aliases.emplace_back(name, first->second);
      return;
    }
    if (rank_ == 0) capture_.parameters.push_back({name, role});
    const bool buffer = std::string_view(role) == "buffer";
    if (!buffer || rank_ == 0) AddState(name, "weight", tensor, !buffer, false, buffer);
  }

  const std::string& NameOf(const void* key) const {
    const auto found = names_.find(key);
    if (found == names_.end())
      throw Unholdable{
          "a parameter of the optimizer is not one of the "
          "model"};
    return found->second;
  }

  void AddState(const std::string& name, const char* kind, const Tensor& tensor, bool updated,
                bool number, bool mine = false) {
    CapturedTensor captured = Hold(StrCat(kind, " of ", name), tensor, updated);
    captured.parameter = name;
    captured.kind = kind;
    captured.number = number;
    if (mine) return capture_.tensors.push_back(std::move(captured));
    shared_.push_back({kept_.back().nbytes(), std::move(captured)});
  }

  void AddPickle(const std::string& key, const std::string& text) {
    const Tensor bytes = torch::empty({static_cast<int64_t>(text.size())}, torch::kUInt8);
    std::copy(text.begin(), text.end(), bytes.mutable_data_ptr<uint8_t>());
    CapturedTensor captured = Hold(key, bytes, false);
    captured.key = key;
    if (rank_ == 0) capture_.tensors.push_back(std::move(captured));
  }

  CapturedTensor Hold(const std::string& name, const Tensor& tensor, bool updated) {
    if (tensor.layout() != c10::kStrided || tensor.is_quantized()) {
      throw Unholdable{StrCat(name, " is not a strided tensor")};
    }
    const bool here = tensor.is_cpu() || tensor.is_cuda();
    const bool lazy = updated && here && tensor.is_contiguous() && tensor.nbytes() >= kSmall &&
                      !tensor.is_inference() && !tensor.is_neg() && !tensor.is_conj();
    const Tensor plain =
        lazy ? tensor.detach() : tensor.detach().resolve_conj().resolve_neg().cpu().contiguous();
    CapturedTensor captured;
    captured.dtype = DTypeOf(plain, name);
    for (const int64_t size : plain.sizes()) captured.shape.push_back(static_cast<uint64_t>(size));
    captured.from = static_cast<const std::byte*>(plain.const_data_ptr());
    captured.device = plain.is_cuda() ? plain.device().index() : kHost;
    captured.lazy = lazy;
    if (captured.device != kHost) devices_.insert(captured.device);
    if (lazy) watched_.push_back({name, tensor, tensor._version(), tensor.const_data_ptr()});
    kept_.push_back(plain);
    return captured;
  }

  // Picks an even part, by bytes, of what all ranks hold alike: this rank writes that.
  void Share() {
    std::sort(shared_.begin(), shared_.end(), [](const Shared& a, const Shared& b) {
      return std::tie(b.bytes, a.tensor.parameter, a.tensor.kind) <
             std::tie(a.bytes, b.tensor.parameter, b.tensor.kind);
    });
    std::vector<uint64_t> loads(world_, 0);
    for (Shared& one : shared_) {
      const auto least = std::min_element(loads.begin(), loads.end());
      *least += one.bytes;
      if (least - loads.begin() == rank_) capture_.tensors.push_back(std::move(one.tensor));
    }
  }

  const uint32_t rank_;
  const uint32_t world_;
  Capture capture_;
  std::vector<Shared> shared_;
  std::vector<Tensor> kept_;
  std::vector<Watched> watched_;
  std::set<int> devices_;
  std::unordered_map<const void*, std::string> names_;  // by TensorImpl
};

}  // namespace

Result<std::unique_ptr<TorchSnapshotter>> TorchSnapshotter::Make(
    std::shared_ptr<torch::nn::Module> module, std::shared_ptr<torch::optim::Optimizer> optimizer,
    WriterOptions options) {
  if (!module || !optimizer)
    return Fail(ErrorCode::kInvalid,
                "the module or the optimizer is "
                "missing");
  if (!KindOf(*optimizer)) {
    return Fail(ErrorCode::kUnsupported,
                "snapshots know only Adam, AdamW, SGD, RMSprop and Adagrad of libtorch's "
                "optimizers");
  }
  CKPT_RETURN_IF_ERROR(CheckName(options.run, "run"));
  if (options.world == 0 || options.rank >= options.world) {
    return Fail(ErrorCode::kInvalid, StrCat("the rank must be below the "
                                            "world: ",
                                            options.rank, " of ", options.world));
  }
  if (options.job.empty() && options.world > 1) {
    return Fail(ErrorCode::kInvalid, "`job` is empty: give all ranks the same text");
  }
  if (options.job.empty()) {
    const auto now = std::chrono::system_clock::now().time_since_epoch().count();
    options.job = StrCat(kOwnJob, DigestOf(StrCat(getpid(), "\n", now)).Hex());
  }
  if (!options.make_copier) options.make_copier = CudaCopierMaker();
  return std::unique_ptr<TorchSnapshotter>(
      new TorchSnapshotter(std::move(module), std::move(optimizer), std::move(options)));
}

TorchSnapshotter::TorchSnapshotter(std::shared_ptr<torch::nn::Module> module,
                                   std::shared_ptr<torch::optim::Optimizer> optimizer,
                                   WriterOptions options)
    : module_(std::move(module)),
      optimizer_(std::move(optimizer)),
      rank_(options.rank),
      world_(options.world),
      writer_(std::move(options)) {}

bool TorchSnapshotter::Save(uint64_t step, std::optional<std::chrono::milliseconds> limit) {
  std::string why;
  try {
    const torch::NoGradGuard no_grad;
    Shot shot(step, rank_, world_);
    shot.AddModule(*module_);
    shot.AddOptimizer(*optimizer_, *KindOf(*optimizer_));
    return writer_.Save(std::move(shot).Finish(), limit);
  } catch (const Unholdable& error) {
    why = StrCat(error.what, ": a snapshot cannot hold it");
  } catch (const std::exception& error) {
    why = error.what();
  }
  writer_.Drop(step, why);
  return false;
}

}  // namespace ckptfs
