// SPDX-License-Identifier: Apache-2.0
//
// RandomCase makes, from a seed, an atom spread over files in some random way
// and a random target local tensor of it, together with the bytes a reader
// must give, computed one element at a time by the definition in
// core/tensor/piece.h.
//
// Thread safety: none; one per test.
// Lifetime: its files go when it goes.

#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "core/model/step_model.h"
#include "core/view/plan.h"

namespace ckptfs {

class RandomCase {
 public:
  explicit RandomCase(uint64_t seed);
  ~RandomCase();

  const StepModel& model() const { return model_; }
  const Plan& plan() const { return plan_; }
  // The whole virtual file.
  const std::string& expected() const { return expected_; }
  // The case in words, for failure messages.
  std::string Describe() const;

 private:
  uint64_t Pick(uint64_t below) {
    return std::uniform_int_distribution<uint64_t>(0, below - 1)(random_);
  }
  bool Chance(int percent) { return Pick(100) < static_cast<uint64_t>(percent); }

  Shape RandomShape();
  std::vector<Piece> RandomBoxes(const Shape& shape);
  LocalTensor Pack(const Shape& atom, std::vector<Piece> boxes, bool scaled);
  Gather MakeGather(uint64_t slice);
  void StoreLocal(Gather& gather, uint32_t local, uint64_t slice);
  void AddSeries(Gather& gather, uint32_t local, const std::string& bytes);
  void MakeFile();
  void WriteBlobs();
  double ValueOf(uint64_t flat, uint64_t slice) const;

  std::mt19937_64 random_;
  std::string directory_;
  StepModel model_;
  std::vector<std::string> blob_bytes_;
  Plan plan_;
  std::string expected_;
};

}  // namespace ckptfs
