// SPDX-License-Identifier: Apache-2.0
//
// A step made of files that a test writes: each copy of a tensor is cut into runs of its
// elements, each of which goes to a file.
//
// Thread safety: none.
// Lifetime: the files are removed with it.
// Units: elements of one byte each.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/blob/blob_reader.h"
#include "core/model/step_model.h"
#include "tests/support/stamp_of_file.h"
#include "tests/support/temporary_directory.h"

namespace ckptfs {

class StoredStep {
 public:
  // One run of a copy: the next `elements` of the tensor lie in `file`.
  struct Run {
    uint32_t file = 0;
    uint64_t elements = 0;
  };
  struct Copy {
    std::string values;  // of the whole tensor, row by row
    std::vector<Run> runs;
  };

  explicit StoredStep(uint32_t files) : texts_(files) {
    model_.roots = {directory_.path()};
    for (uint32_t i = 0; i < files; ++i) {
      model_.blobs.emplace_back();
      model_.blobs.back().path = "file" + std::to_string(i);
    }
  }

  AtomIndex Add(const std::string& name, const std::string& kind, const std::vector<Copy>& copies,
                SourceKind source = SourceKind::kReplicas) {
    Atom atom;
    atom.parameter = Named(name);
    atom.kind = kind;
    atom.dtype = DType::kU8;
    atom.shape = {copies[0].values.size()};
    atom.source.kind = copies.size() == 1 ? SourceKind::kGather : source;
    for (const Copy& copy : copies) atom.source.gathers.push_back(Stored(atom.shape, copy));
    model_.atoms.push_back(std::move(atom));
    return AtomIndex{static_cast<uint32_t>(model_.atoms.size() - 1)};
  }

  // Writes the files.
  void Finish() {
    for (uint32_t i = 0; i < texts_.size(); ++i) Rewrite(i);
    model_.BuildIndex();
  }
  void Rewrite(uint32_t file) {
    model_.blobs[file].stamp =
        *StampOfFile(directory_.Write(model_.blobs[file].path, texts_[file]));
  }
  StepModel& model() { return model_; }
  std::string PathOf(uint32_t file) const { return model_.PathOf(model_.blobs[file]); }
  std::unique_ptr<BlobReader> Open() const { return BlobReader::Create(model_, {}); }

 private:
  ParameterIndex Named(const std::string& name) {
    for (uint32_t i = 0; i < model_.parameters.size(); ++i)
      if (model_.parameters[i].name == name) return ParameterIndex{i};
    model_.parameters.emplace_back();
    model_.parameters.back().name = name;
    return ParameterIndex{static_cast<uint32_t>(model_.parameters.size() - 1)};
  }
  Gather Stored(const Shape& shape, const Copy& copy) {
    Gather gather;
    gather.locals = {WholeTensor(shape)};
    uint64_t at = 0;
    for (const Run& run : copy.runs) {
      FragmentSeries series;
      series.flat_begin = at;
      series.elements = run.elements;
      series.blob = run.file;
      series.offset = texts_[run.file].size();
      series.dtype = DType::kU8;
      texts_[run.file] += copy.values.substr(at, run.elements);
      at += run.elements;
      gather.series.push_back(series);
    }
    return gather;
  }

  TemporaryDirectory directory_;
  StepModel model_;
  std::vector<std::string> texts_;
};

}  // namespace ckptfs
